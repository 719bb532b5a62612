"""The whole NAM56R on two H200 as two pipeline stages; the heads and MTP are on the second.

Every DSA layer selects its own keys: a stage may not begin with one that uses another's. The trunk
is divided evenly; with `|` in the pattern, the second stage can have fewer layers.
"""

from cppmega.recipe.index import load

RECIPE = load("nam56r_h200_2gpu_ep2").with_(
    name="nam56r_full_h200_2gpu_pp2",
    purpose="the whole NAM56R on 2 x H200, PP 2, dense indexer loss",
    expert_model_parallel_size=1,
    pipeline_model_parallel_size=2,
    overlap_grad_reduce=False,  # every parameter is on one GPU alone
    overlap_param_gather=False,
)
