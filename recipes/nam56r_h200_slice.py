"""NAM56R's widths on one H200, with the layers that Megatron releases have: the benchmark run.

It has none of the whole model's fused kernels, so that patches are measured against plain stock.
"""

from cppmega.recipe.index import load

RECIPE = load("nam56r_h200_8gpu_bf16").with_(
    name="nam56r_h200_slice",
    purpose="NAM56R's widths, 6 layers and 2 MTP depths, on one H200",
    gpus=1,
    pattern="DE+EDE/D-/D-",
    mamba3=None,
    m2rnn=None,
    ngram_hash=None,
    structure=None,
    moe_permute_fusion=False,
    moe_router_fusion=False,
    gradient_accumulation_fusion=False,
    environment=(("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),),
    expert_model_parallel_size=1,
    micro_batch_size=1,
    global_batch_size=1,
    overlap_grad_reduce=False,
    overlap_param_gather=False,
    train_iters=50,
    recompute_modules=(),
    cross_entropy_fusion_impl="native",
    patches=("dataset_helpers_prebuilt", "dsa_hadamard_transform"),  # stock's DSA is measured, too
)
