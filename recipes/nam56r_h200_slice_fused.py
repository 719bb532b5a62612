"""The NAM56R slice with everything fused: DSA's kernels, and the heads' losses without logits.

With the backend tilelang, `dsa_attention_kernels` and `dsa_indexer_kernels` run in place of
TileLang's. The indexer loss is over the selected keys, the only one that TileLang's indexer
supports, and not that of the other slice.
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
