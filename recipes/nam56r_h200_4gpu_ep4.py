"""The slice of every kind of layer on four H200, its experts and optimizer spread over all of them.

A step has the sequences of the whole model's. With two per GPU, as the slice has on one, what
happens once per step would take a tenth of it.
"""

from cppmega.recipe.index import load

RECIPE = load("nam56r_h200_slice_whole").with_(
    name="nam56r_h200_4gpu_ep4",
    purpose="NAM56R's widths, 7 layers and 2 MTP depths of every kind, on 4 x H200, EP 4",
    gpus=4,
    expert_model_parallel_size=4,
    micro_batch_size=8,
    global_batch_size=64,
    overlap_grad_reduce=True,
    overlap_param_gather=True,
)
