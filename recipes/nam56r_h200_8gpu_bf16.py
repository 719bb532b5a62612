"""The whole NAM56R on one host of 8 H200, bf16: PP 1, EP 4, micro-batch 8, global batch 64.

Experts are recomputed, Mamba layers are not: with the experts' activations kept as well, the memory
estimate exceeds the GPU's memory.
"""

from cppmega.recipe import M2RNN, Mamba3, NgramHash, Recipe, Structure

DSA_LAYERS = {5, 9, 13, 21, 25, 29, 37, 41, 45}
"""Counted from 1; the other attention layers are full MLA."""


def pattern() -> str:
    """AEMEAEMEAEMR tiled to 52 layers, each A resolved to D or +, and two MTP depths."""
    tiled = ("AEMEAEMEAEMR" * 5)[:52]
    letters = [
        ("D" if place in DSA_LAYERS else "+") if letter == "A" else letter
        for place, letter in enumerate(tiled, start=1)
    ]
    return "".join(letters) + "/+-/+-"


RECIPE = Recipe(
    name="nam56r_h200_8gpu_bf16",
    purpose="the whole NAM56R on 8 x H200, EP 4, dense indexer loss",
    kind="hybrid",
    precision="bf16",
    gpus=8,
    pattern=pattern(),
    hidden_size=4096,
    ffn_hidden_size=21504,
    num_attention_heads=32,
    kv_channels=128,
    seq_length=4096,
    vocab_size=65536,
    q_lora_rank=64,
    kv_lora_rank=64,
    qk_head_dim=64,
    qk_pos_emb_head_dim=64,
    v_head_dim=64,
    dsa_indexer_n_heads=32,
    dsa_indexer_head_dim=64,
    dsa_indexer_topk=256,
    dsa_indexer_loss_coeff=0.001,
    # As released, both fused backends decline widths of 128 and 64, and tilelang the dense loss:
    # `dsa_attention_kernels` and `dsa_indexer_kernels` do both, with every backend but cudnn.
    dsa_kernel_backend="none",
    num_experts=16,
    moe_router_topk=4,
    moe_ffn_hidden_size=896,
    moe_shared_expert_intermediate_size=1024,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_aux_loss_coeff=1e-4,
    moe_permute_fusion=True,
    moe_router_fusion=True,
    mamba3=Mamba3(),
    m2rnn=M2RNN(),
    ngram_hash=NgramHash(),
    structure=Structure(),
    expert_model_parallel_size=4,
    micro_batch_size=8,
    global_batch_size=64,
    overlap_grad_reduce=True,
    overlap_param_gather=True,
    train_iters=100_000,
    lr=1e-4,
    lr_warmup_iters=100,
    clip_grad=1.0,
    gradient_accumulation_fusion=True,
    recompute_modules=("moe", "mlp", "mla_up_proj"),
    cross_entropy_fusion_impl="linear",
    patches=("dataset_helpers_prebuilt", "dsa_hadamard_transform", "dsa_attention_kernels"),
    architectures=("sm_90",),
    stack=(("torch", ">=2.11"), ("cuda", ">=12.8"), ("transformer-engine", ">=2.20")),
    environment=(
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        # The products of all experts of a layer in one launch, where Transformer Engine can.
        ("NVTE_USE_CUTLASS_GROUPED_GEMM", "1"),
    ),
)
