"""The Mamba-3 slice under tensor parallelism: DSA, Mamba-3 and the heads' losses on four H200."""

from cppmega.recipe.index import load

RECIPE = load("nam56r_h200_slice_mamba3").with_(
    name="nam56r_h200_4gpu_tp4",
    purpose="NAM56R's widths, 4 layers, Mamba-3 among them and in 2 MTP depths, on 4 x H200, TP 4",
    gpus=4,
    tensor_model_parallel_size=4,
)
