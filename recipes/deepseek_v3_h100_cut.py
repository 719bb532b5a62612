"""A part of DeepSeek-V3 on one H100 of 80 GB: full widths and vocabulary, one MoE layer and MTP.

8 of the 256 experts: what one GPU would hold at EP 32. For that reason, routing is not
group-limited, and all 8 experts are chosen; the rates of a token are those of the whole model. The
rotary embedding is the one of pretraining, before YaRN. Stock Megatron builds the model as it is.
Neither the speed nor the losses of this run are those of the whole model.
"""

from cppmega.recipe import Recipe

RECIPE = Recipe(
    name="deepseek_v3_h100_cut",
    purpose="DeepSeek-V3's widths, 1 MoE layer of 61 and 1 MTP depth, on one H100 (80 GB)",
    cut="1 of 61 layers and 1 MTP depth, 8 of 256 experts",
    kind="gpt",
    precision="bf16",
    gpus=1,
    num_layers=1,
    mtp_num_layers=1,
    attention="mla",
    hidden_size=7168,
    ffn_hidden_size=18432,
    num_attention_heads=128,
    seq_length=4096,
    vocab_size=129280,
    activation="swiglu",
    norm_epsilon=1e-6,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_head_dim=128,
    qk_pos_emb_head_dim=64,
    v_head_dim=128,
    qk_layernorm=True,
    num_experts=8,
    moe_router_topk=8,
    moe_ffn_hidden_size=2048,
    moe_shared_expert_intermediate_size=2048,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_topk_scaling_factor=2.5,
    moe_aux_loss_coeff=1e-4,
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
        ("NVTE_USE_CUTLASS_GROUPED_GEMM", "1"),
    ),
)
