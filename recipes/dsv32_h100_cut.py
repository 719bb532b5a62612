"""A part of DeepSeek-V3.2 on one H100 of 80 GB: full widths, one MoE block with DSA, and MTP.

8 of the 256 experts: what one GPU would hold at EP 32. For that reason, routing is not
group-limited, and all 8 experts are chosen. Attention has a key per head, since 2048 of at most
4096 keys are chosen. Stock Megatron builds the model, but its DSA needs fast-hadamard-transform, or
the page `dsa_hadamard_transform`. Neither the speed nor the losses of this run are those of the
whole model.
"""

from cppmega.recipe.index import load

RECIPE = load("dsv32_h200_slice").with_(
    name="dsv32_h100_cut",
    purpose="DeepSeek-V3.2's widths, 1 MoE block of 61 and 1 MTP depth, on one H100 (80 GB)",
    cut="1 of 61 blocks and 1 MTP depth, 8 of 256 experts",
    pattern="DE/DE",
    num_experts=8,
    moe_permute_fusion=True,
    moe_router_fusion=True,
    dsa_kernel_backend="none",
    gates=(("CPPMEGA_DSA_KEY_PER_HEAD", "1"),),
    stack=load("deepseek_v3_h100_cut").stack,
    global_batch_size=4,
)
