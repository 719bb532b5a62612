"""The fused NAM56R slice with 4 residual streams (mHC), on this package's kernels.

Micro-batches of 4: every sub-layer keeps activations of the streams.
"""

from cppmega.recipe.index import load

RECIPE = load("nam56r_h200_slice_fused").with_(
    name="nam56r_h200_slice_mhc",
    purpose="the fused NAM56R slice with 4 residual streams (mHC), on one H200",
    mhc_num_residual_streams=4,
    micro_batch_size=4,
    global_batch_size=4,
)
