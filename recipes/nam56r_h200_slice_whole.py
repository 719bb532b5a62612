"""Every kind of NAM56R's layers and input embeddings, at its widths, in few layers on one H200."""

from cppmega.recipe.index import load

RECIPE = load("nam56r_h200_1gpu").with_(
    name="nam56r_h200_slice_whole",
    purpose="NAM56R's widths, 7 layers and 2 MTP depths of every kind, on one H200",
    pattern="+EMDEMR/+-/+-",
    micro_batch_size=2,
    global_batch_size=2,
    train_iters=50,
    recompute_modules=(),
    keep_checkpoints=0,
    async_save=False,
)
