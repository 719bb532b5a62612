"""A part of NAM56R on one H100 of 80 GB: full widths, the first 24 of 52 layers, two MTP depths.

The whole model's weights, gradients and optimizer states do not fit there. Neither the speed nor
the losses of this run are those of NAM56R.
"""

from cppmega.recipe.index import load

_WHOLE = load("nam56r_h200_1gpu")
_LAYERS = 24

RECIPE = _WHOLE.with_(
    name="nam56r_h100_1gpu_cut",
    purpose="24 of NAM56R's 52 layers on one H100 (80 GB), dense indexer loss",
    cut=f"{_LAYERS} of {len(_WHOLE.layout.trunk)} layers",
    pattern=_WHOLE.layout.trunk[:_LAYERS] + "/+-/+-",
    micro_batch_size=1,
    gates=(("CPPMEGA_MAMBA_RECOMPUTE", "1"),),
)
