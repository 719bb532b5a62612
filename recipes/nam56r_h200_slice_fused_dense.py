"""The fused NAM56R slice with Megatron's default indexer loss, over all keys a query may see.

TileLang only has kernels for the loss over the selected keys; `dsa_indexer_kernels` has both.
"""

from cppmega.recipe.index import load

RECIPE = load("nam56r_h200_slice_fused").with_(
    name="nam56r_h200_slice_fused_dense",
    purpose="the fused NAM56R slice on one H200 with the dense indexer loss",
    dsa_indexer_use_sparse_loss=False,
)
