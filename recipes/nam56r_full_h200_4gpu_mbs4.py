"""The whole NAM56R on four H200 with EP 4, at the micro-batch at which nothing is recomputed.

On one host it was 10 % faster per GPU than micro-batches of eight with their experts
recomputed (`benchmarks/results/nam56r_full_h200_4gpu_rows.md`).
"""

from cppmega.recipe.index import load

RECIPE = load("nam56r_h200_2gpu_ep2").with_(
    name="nam56r_full_h200_4gpu_mbs4",
    purpose="the whole NAM56R on 4 x H200, EP 4, nothing recomputed, dense indexer loss",
    gpus=4,
    expert_model_parallel_size=4,
    global_batch_size=32,
)
