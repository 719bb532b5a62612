"""The slice on 4 H200, experts distributed: NCCL, EP and the sharded optimizer in one run."""

from cppmega.recipe.index import load

RECIPE = load("nam56r_h200_slice").with_(
    name="nam56r_h200_4gpu_ep4",
    purpose="the NAM56R slice on 4 x H200, experts spread over all 4",
    gpus=4,
    expert_model_parallel_size=4,
    global_batch_size=4,
    overlap_grad_reduce=True,
    overlap_param_gather=True,
    train_iters=20,
)
