"""A part of Nemotron-H 8B on one H100 of 80 GB: full widths and vocabulary, 11 of 52 layers.

The first 5 Mamba-2 layers, 5 MLPs and the first attention layer. Megatron's Mamba-2 mixer needs
mamba-ssm, and causal-conv1d for its convolution, which no kernel of cppmega replaces. Where that
package is missing, `-- --disable-mamba-mem-eff-path` convolves with torch: slower, and with more
memory. Stock Megatron builds the model as it is. Neither the speed nor the losses of this run are
those of the whole model.
"""

from cppmega.recipe import Mamba2, Recipe

PATTERN = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
"""All 52 layers, without rotary embeddings."""
LAYERS = 11

RECIPE = Recipe(
    name="nemotron_h_h100_cut",
    purpose=f"{LAYERS} of Nemotron-H 8B's {len(PATTERN)} layers on one H100 (80 GB)",
    cut=f"{LAYERS} of {len(PATTERN)} layers",
    kind="hybrid",
    precision="bf16",
    gpus=1,
    pattern=PATTERN[:LAYERS],
    mamba2=Mamba2(heads=128, head_dim=64, state_dim=128, groups=8),
    hidden_size=4096,
    ffn_hidden_size=21504,
    num_attention_heads=32,
    num_query_groups=8,
    kv_channels=128,
    seq_length=8192,
    vocab_size=131072,
    activation="squared_relu",
    position_embedding_type="none",
    micro_batch_size=1,
    global_batch_size=4,
    train_iters=50,
    lr=1e-4,
    lr_warmup_iters=100,
    patches=("dataset_helpers_prebuilt",),
    stack=(("torch", ">=2.11"), ("cuda", ">=12.8"), ("transformer-engine", ">=2.20")),
    environment=(("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),),
)
