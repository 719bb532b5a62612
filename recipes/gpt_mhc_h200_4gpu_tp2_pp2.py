"""The GPT with 4 residual streams (mHC) on four H200: two pipeline stages of two ranks each."""

from cppmega.recipe.index import load

RECIPE = load("gpt_mhc_h200").with_(
    name="gpt_mhc_h200_4gpu_tp2_pp2",
    purpose="a GPT of 8 layers and 4 residual streams (mHC), on 4 x H200, TP 2 PP 2",
    gpus=4,
    tensor_model_parallel_size=2,
    pipeline_model_parallel_size=2,
    global_batch_size=8,
)
