"""DeepSeek-V3.2's widths on one H200: one dense and one MoE block, and one MTP depth.

16 of the 256 experts: what one GPU would hold at EP 16. For that reason, routing is not
group-limited. Built as a hybrid model, because Megatron's GPT builder does not support MTP with
DSA.
"""

from cppmega.recipe import Recipe

RECIPE = Recipe(
    name="dsv32_h200_slice",
    purpose="DeepSeek-V3.2's widths, 2 blocks and 1 MTP depth, on one H200",
    kind="hybrid",
    precision="bf16",
    gpus=1,
    pattern="D-DE/DE",
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
    dsa_indexer_n_heads=64,
    dsa_indexer_head_dim=128,
    dsa_indexer_topk=2048,
    dsa_indexer_loss_coeff=0.001,
    dsa_indexer_use_sparse_loss=True,
    dsa_kernel_backend="tilelang",
    num_experts=16,
    moe_router_topk=8,
    moe_ffn_hidden_size=2048,
    moe_shared_expert_intermediate_size=2048,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_topk_scaling_factor=2.5,
    moe_aux_loss_coeff=1e-4,
    micro_batch_size=1,
    global_batch_size=1,
    train_iters=50,
    lr=1e-4,
    lr_warmup_iters=100,
    patches=("dataset_helpers_prebuilt", "dsa_hadamard_transform"),
    architectures=("sm_90",),
    stack=(
        *(("torch", ">=2.11"), ("cuda", ">=12.8"), ("transformer-engine", ">=2.20")),
        ("tilelang", ">=0.1.8"),
    ),
    environment=(("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),),
)
