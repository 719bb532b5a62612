"""A part of Qwen3-30B-A3B on one H100 of 80 GB: full widths and vocabulary, 4 of 48 layers.

Each layer has all 128 experts. The router takes a softmax over the chosen 8, which equals the
published model's softmax over all, normalized over the chosen ones. Stock Megatron builds the model
as it is. Neither the speed nor the losses of this run are those of the whole model.
"""

from cppmega.recipe import Recipe

LAYERS = 4

RECIPE = Recipe(
    name="qwen3_30b_a3b_h100_cut",
    purpose=f"{LAYERS} of Qwen3-30B-A3B's 48 layers on one H100 (80 GB)",
    cut=f"{LAYERS} of 48 layers",
    kind="gpt",
    precision="bf16",
    gpus=1,
    num_layers=LAYERS,
    hidden_size=2048,
    ffn_hidden_size=6144,
    num_attention_heads=32,
    num_query_groups=4,
    kv_channels=128,
    qk_layernorm=True,
    seq_length=4096,
    vocab_size=151936,
    activation="swiglu",
    norm_epsilon=1e-6,
    rotary_base=1_000_000,
    num_experts=128,
    moe_router_topk=8,
    moe_ffn_hidden_size=768,
    moe_aux_loss_coeff=1e-3,
    moe_permute_fusion=True,
    moe_router_fusion=True,
    micro_batch_size=1,
    global_batch_size=4,
    train_iters=50,
    lr=1e-4,
    lr_warmup_iters=100,
    patches=("dataset_helpers_prebuilt",),
    architectures=("sm_90",),
    stack=(("torch", ">=2.11"), ("cuda", ">=12.8"), ("transformer-engine", ">=2.20")),
    environment=(
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        # The products of all experts of a layer in one launch, where Transformer Engine can.
        ("NVTE_USE_CUTLASS_GROUPED_GEMM", "1"),
    ),
)
