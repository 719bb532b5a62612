"""The whole NAM56R on two H200 in four stages, two on each, interleaved by Megatron's schedule.

The last stage, with the heads and the MTP depths, has 8 of the 52 layers. Of the activations of
micro-batches of four sequences, too many would be in flight.
"""

from itertools import pairwise

from cppmega.recipe.index import load

_PATTERN = load("nam56r_h200_2gpu_ep2").pattern
_STARTS = (0, 15, 29, 44, len(_PATTERN))

RECIPE = load("nam56r_full_h200_2gpu_pp2").with_(
    name="nam56r_full_h200_2gpu_pp2_vpp2",
    purpose="the whole NAM56R on 2 x H200, PP 2 VPP 2, dense indexer loss",
    pattern="|".join(_PATTERN[start:end] for start, end in pairwise(_STARTS)),
    virtual_pipeline_model_parallel_size=2,
    micro_batch_size=2,
)
