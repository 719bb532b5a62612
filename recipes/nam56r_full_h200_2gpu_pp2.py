"""The whole NAM56R on two H200 as two pipeline stages; the heads and MTP are on the second.

Every DSA layer selects its own keys: a stage may not begin with one that uses another's. The second
stage has 22 of the 52 layers, because the heads and the MTP depths take the time of eight.
"""

from cppmega.recipe.index import load

_WHOLE = load("nam56r_h200_2gpu_ep2")
_FIRST = 30

RECIPE = _WHOLE.with_(
    name="nam56r_full_h200_2gpu_pp2",
    purpose="the whole NAM56R on 2 x H200, PP 2, dense indexer loss",
    pattern=f"{_WHOLE.pattern[:_FIRST]}|{_WHOLE.pattern[_FIRST:]}",
    expert_model_parallel_size=1,
    pipeline_model_parallel_size=2,
    overlap_grad_reduce=False,  # every parameter is on one GPU alone
    overlap_param_gather=False,
)
