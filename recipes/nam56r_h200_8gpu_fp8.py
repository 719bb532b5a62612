"""The whole NAM56R on one host of 8 H200 with FP8 matrix products (per-tensor scaling).

EP 8 and micro-batch 10. M2RNN's projections and DSA stay in bf16.
"""

from cppmega.recipe.index import load

RECIPE = load("nam56r_h200_8gpu_bf16").with_(
    name="nam56r_h200_8gpu_fp8",
    purpose="the whole NAM56R on 8 x H200, EP 8, FP8, dense indexer loss",
    precision="fp8",
    fp8_format="hybrid",
    fp8_recipe="tensorwise",
    expert_model_parallel_size=8,
    micro_batch_size=10,
    global_batch_size=80,
    recompute_modules=("moe_act", "mlp", "mla_up_proj"),
    gates=(("CPPMEGA_MAMBA_RECOMPUTE", "1"),),
)
