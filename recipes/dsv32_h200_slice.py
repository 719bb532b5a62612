"""DeepSeek-V3.2's widths on one H200: one dense and one MoE block, and one MTP depth.

16 of the 256 experts: what one GPU would hold at EP 16. For that reason, routing is not
group-limited. Built as a hybrid model, because Megatron's GPT builder does not support MTP with
DSA.
"""

from cppmega.recipe.index import load

RECIPE = load("deepseek_v3_h100_cut").with_(
    name="dsv32_h200_slice",
    purpose="DeepSeek-V3.2's widths, 2 blocks and 1 MTP depth, on one H200",
    cut="",
    kind="hybrid",
    num_layers=0,
    mtp_num_layers=0,
    attention="full",
    pattern="D-DE/DE",
    dsa_indexer_n_heads=64,
    dsa_indexer_head_dim=128,
    dsa_indexer_topk=2048,
    dsa_indexer_loss_coeff=0.001,
    dsa_indexer_use_sparse_loss=True,
    dsa_kernel_backend="tilelang",
    num_experts=16,
    moe_permute_fusion=False,
    moe_router_fusion=False,
    global_batch_size=1,
    patches=("dataset_helpers_prebuilt", "dsa_hadamard_transform"),
    stack=(
        *(("torch", ">=2.11"), ("cuda", ">=12.8"), ("transformer-engine", ">=2.20")),
        ("tilelang", ">=0.1.8"),
    ),
    environment=(("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),),
)
