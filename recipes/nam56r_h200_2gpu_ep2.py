"""The whole NAM56R on two H200, with the experts and the optimizer states sharded over them.

Nothing is recomputed.
"""

from cppmega.recipe.index import load

RECIPE = load("nam56r_h200_1gpu").with_(
    name="nam56r_h200_2gpu_ep2",
    purpose="the whole NAM56R on 2 x H200, EP 2, dense indexer loss",
    gpus=2,
    expert_model_parallel_size=2,
    micro_batch_size=4,
    global_batch_size=16,
    recompute_modules=(),
    overlap_grad_reduce=True,
    overlap_param_gather=True,
)
