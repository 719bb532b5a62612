"""The whole NAM56R on one H200: 52 layers, 16 experts, two MTP depths, every input embedding.

Weights, gradients and optimizer states take 97.5 GiB; of the activations of two sequences, those
that cost least are recomputed, so that there is room for an evaluation and a checkpoint.
"""

from cppmega.recipe.index import load

_BASE = load("nam56r_h200_8gpu_bf16")
RECIPE = _BASE.with_(
    name="nam56r_h200_1gpu",
    purpose="the whole NAM56R on one H200, dense indexer loss",
    gpus=1,
    expert_model_parallel_size=1,
    micro_batch_size=2,
    global_batch_size=8,  # 32,768 tokens per GPU and step
    recompute_modules=("moe_act", "mlp", "mla_up_proj"),
    keep_checkpoints=1,  # 75.9 GiB each
    async_save=True,  # training waits for copies on the host, which are as large
    # They change sums or roundings: `python -m cppmega.apply_patches --recipe nam56r_h200_1gpu`.
    patches=(
        *(*_BASE.patches, "te_plain_layers", "router_gating_backward"),
        *("moe_chunks_unsorted", "expert_gelu_kernel", "embedding_gradient_rows"),
    ),
    overlap_grad_reduce=False,
    overlap_param_gather=False,
)
