"""NAM56R's widths on one H200, with Mamba-3 layers in the trunk and in the MTP depths."""

from cppmega.recipe import Mamba3
from cppmega.recipe.index import load

RECIPE = load("nam56r_h200_slice").with_(
    name="nam56r_h200_slice_mamba3",
    purpose="NAM56R's widths, 4 layers, Mamba-3 among them and in 2 MTP depths, on one H200",
    pattern="MDEM/M-/M-",
    mamba3=Mamba3(),
    cross_entropy_fusion_impl="linear",
    patches=("dataset_helpers_prebuilt", "dsa_hadamard_transform", "dsa_attention_kernels"),
)
