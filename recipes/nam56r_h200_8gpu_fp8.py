"""The whole NAM56R on one host of 8 H200 with FP8 matrix products (per-tensor scaling)."""

from cppmega.recipe.index import load

RECIPE = load("nam56r_h200_8gpu_bf16").with_(
    name="nam56r_h200_8gpu_fp8",
    purpose="NAM56R on 8 x H200, FP8, dense indexer loss",
    precision="fp8",
    fp8_format="hybrid",
    fp8_recipe="tensorwise",
)
