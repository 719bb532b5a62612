"""A GPT of 8 layers with 4 residual streams (mHC) on one H200, to measure what the streams cost.

`--set mhc_num_residual_streams=1` is the same GPT without them. The micro-batch leaves room for the
plain implementation (`--set use_fused_mhc=False`), whose backward keeps copies of the streams in
fp32.
"""

from cppmega.recipe import Recipe

RECIPE = Recipe(
    name="gpt_mhc_h200",
    purpose="a GPT of 8 layers and 4 residual streams (mHC), on one H200",
    kind="gpt",
    precision="bf16",
    gpus=1,
    num_layers=8,
    hidden_size=4096,
    ffn_hidden_size=16384,
    num_attention_heads=32,
    seq_length=4096,
    vocab_size=65536,
    activation="squared_relu",
    mhc_num_residual_streams=4,
    micro_batch_size=2,
    global_batch_size=2,
    train_iters=50,
    lr=1e-4,
    lr_warmup_iters=100,
    patches=("dataset_helpers_prebuilt",),
    stack=(("torch", ">=2.11"), ("cuda", ">=12.8"), ("transformer-engine", ">=2.20")),
    environment=(("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),),
)
