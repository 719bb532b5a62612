"""The whole NAM56R on four H200 with EP 4, at the micro-batch of the record.

Mamba-3 and M2RNN layers, experts and dense MLPs are recomputed. With the experts' activations kept,
the memory estimate exceeds the GPU's memory; with the Mamba layers' kept, it is close to it.
"""

from cppmega.recipe.index import load

RECIPE = load("nam56r_h200_2gpu_ep2").with_(
    name="nam56r_full_h200_4gpu",
    purpose="the whole NAM56R on 4 x H200, EP 4, dense indexer loss",
    gpus=4,
    expert_model_parallel_size=4,
    micro_batch_size=8,
    global_batch_size=32,
    recompute_modules=("moe", "mlp", "mla_up_proj"),
)
