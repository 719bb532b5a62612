"""Include MLA and DSA layers in the reported FLOPs.

What: `num_floating_point_operations`, from which the logged TFLOP/s are computed, includes the `+`
    (MLA) and `D` (DSA) layers of a hybrid pattern. For a GPT model it counts DSA as an indexer over
    all pairs and attention over the top-k. The docstrings below contain the formulas.
Why: The `+` and `D` layers of a hybrid model count as zero: the 9 DSA and 4 MLA layers of the
    NAM56R shape are 7 % of its FLOPs at sequence length 4096 (computed with 0.19.2). A GPT model
    with DSA counts dense MLA and no indexer. The result equals what torch counts in a real layer on
    CPU.
Upstream: https://github.com/NVIDIA/Megatron-LM/pull/6331 (open) and #6753 (merged, not released),
    both for GPT only.
Remove: when the hybrid branch counts `D` and `+`, and the GPT branch supports `dsa`.
Numerics: none (bitwise); only the logged throughput changes
"""

from cppmega.edits import replacing
from cppmega.page import Edit, Patch, Source

FLOPS = "megatron/training/training.py:num_floating_point_operations"


def _cppmega_mla_flops(args, tokens, squares):
    """FLOPs of one MLA layer, forward and backward, as (projections, attention).

    Matmuls only, a multiply-add is 2, a backward is 2 forwards. T tokens in sequences with
    sum(L^2) = S; hidden size h, n heads of dn + dr (q, k) and dv (v), ranks r (q) and c (kv):

        projections  3 * 2T * (r*h + r*n*(dn+dr) + h*(c+dr) + c*n*(dn+dv) + n*dv*h)
        attention    3 * 2 * S/2 * n * (dn+dr + dv)        the causal half of the pairs

    Without a query rank the query costs h*n*(dn+dr).
    """
    heads, key = args.num_attention_heads, args.qk_head_dim + args.qk_pos_emb_head_dim
    if args.q_lora_rank is None:
        query = args.hidden_size * heads * key
    else:
        query = args.q_lora_rank * (args.hidden_size + heads * key)
    weights = (
        query
        + args.hidden_size * (args.kv_lora_rank + args.qk_pos_emb_head_dim)
        + args.kv_lora_rank * heads * (args.qk_head_dim + args.v_head_dim)
        + heads * args.v_head_dim * args.hidden_size
    )
    return 6 * tokens * weights, 6 * squares / 2 * heads * (key + args.v_head_dim)


def _cppmega_dsa_flops(args, tokens, squares, decoder, depths):
    """FLOPs of DSA layers beyond their MLA projections: (attention, indexer), all layers together.
    The numbers of the decoder's DSA layers are given, and those of all MTP depths.

    As in `_cppmega_mla_flops`; top-k k, indexer with m heads of d, its query made of r' features
    (r' = r, or h without a query rank), P = the pairs that the top-k leaves: S/2 while a sequence
    is no longer than k, else k*T - k^2/2 per sequence (sequences of unequal length count as the
    token-weighted mean of their lengths):

        attention          3 * 2P * n * (dn+dr + dv)       as MLA (up to 0.18)
                           3 * 2P * n * (c+dr + c)         absorbed: over the compressed keys (0.19)
        indexer, forward   2T * (r'*m*d + h*d + h*m)       projections of q, k and the head weights
                           2 * S/2 * m*d                   scores of every causal pair
        indexer, backward  2T * (r'*m*d + h*d + h*m)       weights only: its inputs are detached
                           2 * 2 * S/2 * m*d               scores; P for S/2 with the sparse loss

    The indexer has a backward only with an indexer loss, and layers that share the top-k of an
    earlier one have no indexer. Norms, RoPE, softmax, the choice of the top-k and the target of the
    indexer loss are not counted.
    """
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention

    if getattr(DSAttention, "consumes_absorbed_v_up_projection", False):
        pair = 2 * args.kv_lora_rank + args.qk_pos_emb_head_dim
    else:
        pair = args.qk_head_dim + args.qk_pos_emb_head_dim + args.v_head_dim
    topk, pairs = args.dsa_indexer_topk, squares / 2
    if squares > topk * tokens:
        pairs = topk * tokens - topk**2 * tokens**2 / (2 * squares)
    attention = 6 * pairs * args.num_attention_heads * pair

    from cppmega.sizes.dsa_layers import indexers_of

    indexers = indexers_of(args, decoder, depths)
    width = args.dsa_indexer_n_heads * args.dsa_indexer_head_dim
    projections = (
        2
        * tokens
        * (
            (args.q_lora_rank or args.hidden_size) * width
            + args.hidden_size * (args.dsa_indexer_head_dim + args.dsa_indexer_n_heads)
        )
    )
    indexer = projections + squares * width
    if (args.dsa_indexer_loss_coeff or 0) > 0:
        sparse = args.dsa_indexer_use_sparse_loss
        indexer += projections + 4 * (pairs if sparse else squares / 2) * width
    return (len(decoder) + len(depths)) * attention, indexers * indexer


def _cppmega_hybrid_latent_flops(args, tokens, squares):
    """FLOPs of the `+` and `D` layers of a hybrid pattern, those of every MTP depth included."""
    from megatron.core.models.hybrid.hybrid_layer_allocation import parse_hybrid_pattern

    pattern = parse_hybrid_pattern(args.hybrid_layer_pattern)
    main, mtp = (pattern.main_pattern or "").replace("|", ""), pattern.mtp_pattern or ""
    mla = main.count("+") + mtp.count("+") * pattern.mtp_num_depths
    decoder = [at for at, symbol in enumerate(main, 1) if symbol == "D"]
    # MTP layers count from 1 again.
    depths = [at for at, symbol in enumerate(mtp, 1) if symbol == "D"] * pattern.mtp_num_depths
    if not mla and not decoder and not depths:
        return 0
    projections, attention = _cppmega_mla_flops(args, tokens, squares)
    flops = (mla + len(decoder) + len(depths)) * projections + mla * attention
    if not decoder and not depths:
        return flops
    return flops + sum(_cppmega_dsa_flops(args, tokens, squares, decoder, depths))


def _cppmega_dsa_minus_mla_flops(args, tokens, squares):
    """What a GPT model with DSA costs beyond the dense MLA that upstream counts for it."""
    if args.experimental_attention_variant != "dsa":
        return 0
    decoder = range(1, args.num_layers + 1)
    depths = range(1, (args.mtp_num_layers or 0) + 1)  # MTP counts from 1 again
    dense = (len(decoder) + len(depths)) * _cppmega_mla_flops(args, tokens, squares)[1]
    return sum(_cppmega_dsa_flops(args, tokens, squares, decoder, depths)) - dense


def _gpt(pins, tokens, squares):
    total = "total_floating_point_operations"
    return Edit(
        target=f"{FLOPS}.transformer_flops",
        pins=pins,
        edit=replacing(
            f"return {total}",
            f"return {total} + _cppmega_dsa_minus_mla_flops(args, {tokens}, {squares})",
        ),
        helpers=(_cppmega_mla_flops, _cppmega_dsa_flops, _cppmega_dsa_minus_mla_flops),
    )


PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=f"{FLOPS}.hybrid_flops",
            pins={
                "0.18.2": "041d50bdb4bf51e7",
                "0.19.2": "041d50bdb4bf51e7",
                "main-d98e8a64": "eb3fb90147a0281e",
            },
            edit=replacing(
                "return flops_fwd * 3",
                """
                # The counts above know no `+` and no `D`.
                latent = _cppmega_hybrid_latent_flops(args, total_tokens, seqlen_squared_sum)
                return flops_fwd * 3 + latent
                """,
            ),
            helpers=(_cppmega_mla_flops, _cppmega_dsa_flops, _cppmega_hybrid_latent_flops),
        ),
        Edit(  # the dev branch has no `+`, and counts `D` as dense MLA
            target=f"{FLOPS}.hybrid_flops",
            pins={"dev-d48bd6be": "35c04b1123051acd"},
            edit=replacing(
                "return flops_fwd * 3",
                """
                # The counts above take a `D` for a dense MLA layer.
                latent = _cppmega_hybrid_latent_flops(args, total_tokens, seqlen_squared_sum)
                if latent:
                    dense = sum(_cppmega_mla_flops(args, total_tokens, seqlen_squared_sum))
                    latent -= args.hybrid_layer_pattern.count("D") * dense
                return flops_fwd * 3 + latent
                """,
            ),
            helpers=(_cppmega_mla_flops, _cppmega_dsa_flops, _cppmega_hybrid_latent_flops),
        ),
        _gpt(
            {
                "0.18.2": "61dac637e0d09ffb",
                "0.19.2": "61dac637e0d09ffb",
                "main-d98e8a64": "23b6ab2b95c79a2d",
                "dev-d48bd6be": "a0dd509b50802bdd",
            },
            "total_real_tokens_in_batch",
            "seqlen_squared_sum_in_batch",
        ),
        _gpt(
            {"0.17.1": "40ae473b5c5f77b1"},
            "batch_size * args.seq_length",
            "batch_size * args.seq_length**2",
        ),
    ),
    reached="log",
    when=lambda args: bool(getattr(args, "multi_latent_attention", False)),
    feature=(FLOPS, "megatron/core/transformer/experimental_attention_variant/dsa.py:DSAttention"),
)


def fixed_upstream(source: Source) -> bool:
    text = source.text(FLOPS)
    return 'experimental_attention_variant == "dsa"' in text and "DS_ATTENTION" in text


def verify() -> None:
    from megatron.training.training import num_floating_point_operations

    from cppmega.proof.stand_ins import Arguments

    args = Arguments(hidden_size=8, num_attention_heads=2, seq_length=4, num_layers=1)
    args.ffn_hidden_size = args.padded_vocab_size = 0
    args.multi_latent_attention, args.experimental_attention_variant = True, "dsa"
    args.q_lora_rank, args.kv_lora_rank = 4, 3
    args.qk_head_dim, args.qk_pos_emb_head_dim, args.v_head_dim = 2, 1, 2
    args.dsa_indexer_n_heads = args.dsa_indexer_head_dim = args.dsa_indexer_topk = 2
    args.dsa_indexer_loss_coeff = 1e-3
    # Indexer 2 * 4 * (16 + 32) + 16 * 4 forward, 384 + 128 backward; attention 6 * 6 pairs * 2
    # heads * 5 (absorbed: 7); projections 6 * 4 * 144, and 7 more for upstream's norms in a GPT.
    flops = num_floating_point_operations(args, 1)
    assert flops in (3624 + 360 + 960, 3624 + 504 + 960), flops

    try:
        from megatron.core.models.hybrid.hybrid_layer_allocation import get_hybrid_layer_counts
    except ImportError:
        return  # hybrid models have no `D` yet
    assert get_hybrid_layer_counts("D")["D"] == 1
    args.hybrid_layer_pattern = "DD/D"
    args.mamba_state_dim = args.mamba_num_groups = args.mamba_num_heads = args.kv_channels = 1
    args.num_query_groups = args.moe_ffn_hidden_size = args.moe_router_topk = 1
    args.mamba_head_dim = args.gdp_num_householder = 1
    flops = num_floating_point_operations(args, 1)
    with_norms = 3 * (3624 + 504 + 960)  # the dev branch counts them in hybrid models too
    assert flops in (3 * (3456 + 360 + 960), 3 * (3456 + 504 + 960), with_norms), flops
