"""A small GPT with two MTP depths on bytes, for a machine without a GPU.

A loop of our own on megatron-core's model, since Megatron's `pretrain` and its optimizer insist
on CUDA. Documents are packed and padded inside the pack: there stock Megatron rolls the labels of
its MTP heads wrongly, and the overlay does not.
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
    lr=3e-3,
    lr_warmup_iters=10,
    weight_decay=0.0,
    packed_documents=True,
    document_multiple=8,
    stack=(("torch", ">=2.6"),),
    patches=("mtp_roll_packed_sequences",),
)
