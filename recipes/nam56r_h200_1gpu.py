"""The whole NAM56R on one H200: 52 layers, 16 experts, two MTP depths, every input embedding.

Weights, gradients and optimizer states alone take 97.5 GiB, so the Mamba-3 and M2RNN layers are
recomputed.
"""

from cppmega.recipe.index import load

RECIPE = load("nam56r_h200_8gpu_bf16").with_(
    name="nam56r_h200_1gpu",
    purpose="the whole NAM56R on one H200, dense indexer loss",
    gpus=1,
    expert_model_parallel_size=1,
    micro_batch_size=1,
    global_batch_size=8,  # 32,768 tokens per GPU and step
    recompute_modules=("moe_act", "mlp", "mla_up_proj"),
    gates=(("CPPMEGA_MAMBA_RECOMPUTE", "1"),),
    keep_checkpoints=1,  # 75.9 GiB each
    overlap_grad_reduce=False,
    overlap_param_gather=False,
)
