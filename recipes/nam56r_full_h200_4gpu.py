"""The whole NAM56R on four H200 with EP 4, at the micro-batch of the record.

The Mamba-3 and M2RNN layers are recomputed, as are activations of experts, dense MLPs and MLA: with
the Mamba layers' kept, the memory estimate exceeds the GPU's memory.
"""

from cppmega.recipe.index import load

RECIPE = load("nam56r_full_h200_4gpu_mbs4").with_(
    name="nam56r_full_h200_4gpu",
    purpose="the whole NAM56R on 4 x H200, EP 4, dense indexer loss",
    micro_batch_size=8,
    recompute_modules=("moe_act", "mlp", "mla_up_proj"),
    gates=(("CPPMEGA_MAMBA_RECOMPUTE", "1"),),
)
