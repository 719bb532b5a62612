"""The whole NAM56R on two H200 in four stages, two on each, interleaved by Megatron's schedule."""

from cppmega.recipe.index import load

RECIPE = load("nam56r_full_h200_2gpu_pp2").with_(
    name="nam56r_full_h200_2gpu_pp2_vpp2",
    purpose="the whole NAM56R on 2 x H200, PP 2 VPP 2, dense indexer loss",
    virtual_pipeline_model_parallel_size=2,
)
