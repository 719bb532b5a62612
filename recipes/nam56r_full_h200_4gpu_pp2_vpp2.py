"""The whole NAM56R on four H200: two pipeline ranks with two stages each, and EP 2."""

from cppmega.recipe.index import load

RECIPE = load("nam56r_full_h200_2gpu_pp2_vpp2").with_(
    name="nam56r_full_h200_4gpu_pp2_vpp2",
    purpose="the whole NAM56R on 4 x H200, PP 2 VPP 2 EP 2, dense indexer loss",
    gpus=4,
    expert_model_parallel_size=2,
    global_batch_size=32,
    overlap_grad_reduce=True,
    overlap_param_gather=True,
)
