"""A small byte-level GPT with two MTP depths, for a machine without a GPU.

The loop is cppmega's own, on megatron-core's model, since Megatron's `pretrain` and its optimizer
require CUDA. Short documents are packed and padded inside the pack, where stock Megatron shifts the
labels and inputs of its MTP heads wrongly and the overlay does not. Without QK normalization the
attention logits of the MTP layers grow with the learning rate; above 2e-3 they saturate, and single
batches spike.
"""

from cppmega.recipe import Recipe

RECIPE = Recipe(
    name="smoke_cpu",
    purpose="a byte-level GPT with MTP that trains on CPU in minutes",
    kind="loop",
    precision="fp32",
    gpus=0,
    num_layers=2,
    mtp_num_layers=2,
    hidden_size=64,
    ffn_hidden_size=256,
    num_attention_heads=4,
    seq_length=128,
    vocab_size=257,
    make_vocab_size_divisible_by=1,
    activation="gelu",
    micro_batch_size=8,
    global_batch_size=8,
    train_iters=200,
    lr=2e-3,
    lr_warmup_iters=20,
    weight_decay=0.0,
    mtp_loss_scaling_factor=0.3,
    packed_documents=True,
    document_multiple=16,
    stack=(("torch", ">=2.6"),),
    patches=("mtp_roll_packed_sequences",),
)
