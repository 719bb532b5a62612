"""The whole NAM56R on two H200 with IndexShare: three of nine DSA layers select keys for all.

The other six have no indexer, so this is a different model: fewer parameters, different losses.
"""

from cppmega.recipe.index import load

RECIPE = load("nam56r_h200_2gpu_ep2").with_(
    name="nam56r_h200_2gpu_ep2_index_share",
    purpose="NAM56R, IndexShare 3 Full + 6 Shared, on 2 x H200, EP 2, dense indexer loss",
    dsa_index_pattern="FSSFSSFSS",
)
