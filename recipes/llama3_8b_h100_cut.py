"""A part of Llama-3 8B on one H100 of 80 GB: full widths and vocabulary, 6 of 32 layers.

Stock Megatron builds it as it is. Neither the speed nor the losses of this run are those of the
whole model.
"""

from cppmega.recipe import Recipe

LAYERS = 6

RECIPE = Recipe(
    name="llama3_8b_h100_cut",
    purpose=f"{LAYERS} of Llama-3 8B's 32 layers on one H100 (80 GB)",
    cut=f"{LAYERS} of 32 layers",
    kind="gpt",
    precision="bf16",
    gpus=1,
    num_layers=LAYERS,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_attention_heads=32,
    num_query_groups=8,
    seq_length=8192,
    vocab_size=128256,
    activation="swiglu",
    rotary_base=500_000,
    micro_batch_size=1,
    global_batch_size=4,
    train_iters=50,
    lr=1e-4,
    lr_warmup_iters=100,
    patches=("dataset_helpers_prebuilt",),
    stack=(("torch", ">=2.11"), ("cuda", ">=12.8"), ("transformer-engine", ">=2.20")),
    environment=(("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),),
)
