"""NAM56R small: each kind of layer and input embedding, in twelve layers of one eighth the width.

It was trained with and without a part, to show what the part does to the losses
(`benchmarks/results/nam56r_parts_h200.md`). Neither its speed nor its losses are those of NAM56R.
"""

from cppmega.recipe.index import load

_WHOLE = load("nam56r_h200_1gpu")

RECIPE = _WHOLE.with_(
    name="nam56r_small_cut",
    purpose="every kind of NAM56R's layers, small, to compare its parts, on one H200",
    cut=f"12 of {len(_WHOLE.layout.trunk)} layers, 512 wide",
    pattern="+EMEDEMEDEMR/+-/+-",
    hidden_size=512,
    ffn_hidden_size=2688,
    num_attention_heads=8,
    kv_channels=64,
    seq_length=2048,
    dsa_indexer_n_heads=8,
    moe_ffn_hidden_size=128,
    moe_shared_expert_intermediate_size=128,
    micro_batch_size=16,
    global_batch_size=16,
    train_iters=500,
    eval_interval=50,
    eval_tokens=2**19,
    lr=1e-3,
    lr_warmup_iters=50,
    recompute_modules=(),
    keep_checkpoints=0,
    async_save=False,
)
"""Wide enough for 16 heads of Mamba-3 and 6 of M2RNN; n-grams and structure are NAM56R's."""
