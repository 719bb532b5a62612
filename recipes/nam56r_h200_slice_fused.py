"""The NAM56R slice with everything fused: DSA on TileLang's kernels, heads' losses without logits.

TileLang's indexer has the sparse loss alone, over the chosen keys: not the loss of the other slice.
"""

from cppmega.recipe.index import load

_SLICE = load("nam56r_h200_slice")

RECIPE = _SLICE.with_(
    name="nam56r_h200_slice_fused",
    purpose="the NAM56R slice on one H200, DSA and losses fused",
    dsa_kernel_backend="tilelang",
    dsa_indexer_use_sparse_loss=True,
    cross_entropy_fusion_impl="linear",
    micro_batch_size=8,
    global_batch_size=8,
    stack=(*_SLICE.stack, ("tilelang", ">=0.1.8")),
)
