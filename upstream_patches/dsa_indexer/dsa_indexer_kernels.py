"""Compute the DSA indexer's scores, top-k and loss in kernels that never hold all scores.

What: `DSAttention.forward` takes the selected keys and the indexer loss, dense or sparse, from
    `cppmega.ops.dsa_indexer`: a single launch computes scores and exact top-k, and the gradients of
    the loss are computed in its forward. This replaces Megatron's default path, and TileLang's
    indexer if that backend is named; the backend cudnn keeps its own. The attention's heads may
    share one set of keys or have their own (0.16 to 0.18). An attention mask other than the causal
    one (packed documents and context parallelism are supported), explicit key positions, fp32, or
    more than 128 index heads are declined: such a call ends the run with the reason, or, with
    `--allow-fallback dsa_indexer_kernels`, takes Megatron's path. CPU tensors are computed by the
    plain reference.
Why: The default path holds several fp32 tensors of `[batch, heads, seq, seq]`: at sequence length
    4096 (32 index heads of 64, top-k 256) the scores alone take 46.8 ms and 32 GiB for a batch of
    8, compared with 1.6 ms and 0.06 GiB for scores and top-k; a batch of 1 takes 76.2 ms compared
    with 1.5 ms with the dense loss and its gradients, and 83.5 ms compared with 1.7 ms with the
    sparse loss and a key per head. TileLang loops over the batch and over chunks of rows: it takes
    50.2 ms in 1390 launches with the sparse loss for a batch of 8, compared with 3.6 ms in 11, and
    has no dense loss (one H200; benchmarks/results/dsa_indexer_h200.md). A NAM56R slice trains 1.26
    times as fast at a micro-batch of 8 (benchmarks/results/dsa_indexer_slices_h200.md).
Upstream: Not sent: the kernels are those of `cppmega.ops`.
Remove: when Megatron's default path selects keys without computing all scores at once.
Numerics: reorders sums; scores are fp32 sums of bf16 products, as TileLang's are. Among equal
    scores, the lowest keys are selected (`torch.topk` leaves the order open), and keys are in
    ascending order. The gradient of the loss is p - t in both of Megatron's definitions: that of
    0.16 to 0.18 vanished where the prediction p is below 1e-10. With torch's deterministic
    algorithms on, gradients are bitwise reproducible; otherwise the sparse loss sums those of the
    keys with atomics.
"""

from __future__ import annotations

from textwrap import indent
from typing import Any

from cppmega.catalogue.megatron_args import uses_dsa
from cppmega.edits import adding_parameter, in_order, inserting, replacing
from cppmega.page import Edit, Patch, Source
from cppmega.rules.combinations import FP32
from cppmega.rules.rule import Part, unsupported

DSA = "megatron/core/transformer/experimental_attention_variant/dsa.py"
TARGET = f"{DSA}:DSAttention.forward"
SPARSE = 'getattr(self.config, "dsa_indexer_use_sparse_loss", False)'


def _cppmega_serves(q, k, mask, key_positions=None):
    """Whether the indexer's kernels compute a call; where the run relies on them, they must."""
    from cppmega.calls import served
    from cppmega.ops.dsa_indexer import obstacle

    reason = obstacle(q, k) if q.is_cuda else None  # a reference computes tensors on the CPU
    if mask is not None:
        reason = "its mask is not that of causal rows"
    elif key_positions is not None:
        reason = "the keys have positions of their own"
    return served("dsa_indexer_kernels", reason, q=q, k=k, mask=mask)


# Since 0.19, every row has bounds.
BY_BOUNDS = """
def cppmega_indexer():
    from cppmega.ops.dsa_indexer import choose_keys, indexer_loss
    from cppmega.ops.common.bounds import Bounds
    from cppmega.ops.dsa_indexer.problem import Loss

    bounds, use_relu = Bounds(), self.config.dsa_indexer_scoring_relu
    if sq != skv or not varlen_is_plain_causal:
        bounds = Bounds(varlen_starts.int(), varlen_ends.int())
    if not use_indexer_loss:
        keys = choose_keys(q, k, weights, self.index_topk, bounds=bounds, use_relu=use_relu)
        return keys, None
    loss = Loss(
        softmax_scale=self.softmax_scale,
        coefficient=indexer_loss_coeff,
        sparse=bool(sparse_indexer_loss),
        per_token=self.config.calculate_per_token_loss,
        tp_group=tp_group,
    )
    attention = query.detach(), key.detach()
    done = indexer_loss(
        q, k, weights, *attention, self.index_topk, loss,
        bounds=bounds, rows=query_valid_rows, use_relu=use_relu,
    )
    return done.indices, done.loss
if computes_topk and self.config.dsa_kernel_backend != "cudnn":
    if _cppmega_serves(q, k, float_mask, key_positions):
        topk_indices, indexer_loss = cppmega_indexer()
"""
CAUSAL = f"""
def cppmega_indexer(coefficient):
    from cppmega.ops.dsa_indexer import choose_keys, indexer_loss
    from cppmega.ops.dsa_indexer.problem import Loss

    topk, total = self.indexer.index_topk, None
    if coefficient is None:  # no gradient is wanted, and no loss
        keys = choose_keys(q, k, weights, topk)
    else:
        loss = Loss(
            softmax_scale=self.softmax_scale,
            coefficient=coefficient,
            sparse={SPARSE},
            inside_logs=True,
            tp_group=self.indexer.pg_collection.tp,
        )
        total, keys = indexer_loss(q, k, weights, query.detach(), key.detach(), topk, loss)
    # `scatter_` takes no -1. A row with fewer keys than the top-k does not see the last one.
    return keys.long().masked_fill(keys < 0, k.size(0) - 1), total
"""
SERVES = """
if _cppmega_serves(q, k, None if attn_mask_type is not None and sq == skv else float_mask):"""
SCORES = (
    "self.indexer.forward_with_scores(x, qr, mask=float_mask, packed_seq_params=packed_seq_params)"
)
FUSED_LOSS = f"""
topk_indices, indexer_loss = FusedDSAIndexerLoss.apply(
    q, weights, k, query.detach(), key.detach(), self.softmax_scale, self.indexer.index_topk,
    indexer_loss_coeff, float_mask, {SPARSE}, self.indexer.pg_collection,
)
"""
LOSS_OF_SCORES = f"""
indexer_loss = compute_dsa_indexer_loss(
    index_scores, topk_indices, query.detach(), key.detach(), self.softmax_scale,
    indexer_loss_coeff, {SPARSE}, self.indexer.pg_collection,
)
"""


def _either(ours: str, megatron: str) -> str:
    """Statements for calls that the kernels support, and for those that they do not."""
    ours, megatron = (indent(text.strip(), "    ") for text in (ours, megatron))
    return f"{SERVES.strip()}\n{ours}\nelse:\n{megatron}\n"


KEYS_ALONE = f"""
assert packed_seq_params is None, "Packed sequence is not supported for DSAttention"
q, k, weights = self.indexer.forward_before_topk(x, qr, packed_seq_params)
{_either("topk_indices, _ = cppmega_indexer(None)", f"_, topk_indices = {SCORES}")}
"""
BOTH = """
coefficient = None
if self.training and torch.is_grad_enabled():
    coefficient = self.config.dsa_indexer_loss_coeff or 0.0
topk_indices, indexer_loss = cppmega_indexer(coefficient)
"""
KEYS_AND_LOSS = f"""
q, k, weights = self.indexer.forward_with_scores(
    x, qr, packed_seq_params=packed_seq_params, before_topk=True
)
{_either(BOTH, f"(index_scores, topk_indices), indexer_loss = {SCORES}, None")}
"""


def _uses_kernels(run: Any) -> bool:
    return uses_dsa(run) and run.dsa_kernel_backend != "cudnn"


def _too_wide(run: Any) -> object:
    heads, width = run.dsa_indexer_n_heads or 0, run.dsa_indexer_head_dim or 0
    return max(heads, width) > 128 and f"{heads} index heads of {width}"


LIMITS = Part("dsa_indexer_kernels", _uses_kernels, "cppmega revert dsa_indexer_kernels")
DECLINED = "The first step would end. Megatron's path holds the scores of all heads in fp32."

PATCH = Patch(
    purpose="feature",
    edits=(
        Edit(
            target=TARGET,
            pins={
                "0.19.2": "bc3bc02b6b7ddf0c",
                "main-d98e8a64": "bc3bc02b6b7ddf0c",
                "dev-d48bd6be": "eb952f1eec56daa5",
            },
            edit=in_order(
                inserting(BY_BOUNDS, after="indexer_loss = None"),
                replacing(
                    "if sparse_indexer_loss and fused_bounds is not None:",
                    "if topk_indices is None and sparse_indexer_loss and fused_bounds is not None:",
                ),
            ),
            helpers=(_cppmega_serves,),
            mark="cppmega_indexer",
        ),
        Edit(
            target=TARGET,
            pins={"0.17.1": "e97cdc0c18dcc2d5", "0.18.2": "e97cdc0c18dcc2d5"},
            edit=in_order(
                inserting(CAUSAL, after="qr = qr.detach()"),
                replacing(
                    FUSED_LOSS,
                    _either(
                        "topk_indices, indexer_loss = cppmega_indexer(indexer_loss_coeff)",
                        FUSED_LOSS,
                    ),
                ),
                replacing(f"_, topk_indices = {SCORES}", KEYS_ALONE),
            ),
            helpers=(_cppmega_serves,),
            mark="cppmega_indexer",
        ),
        # 0.16 computes the inputs of the scores where it computes the scores.
        Edit(
            target=f"{DSA}:DSAIndexer.forward_with_scores",
            pins={"0.16.1": "3f3264055a0eecb1"},
            edit=in_order(
                adding_parameter("before_topk=False"),
                inserting(
                    "if before_topk:\n    return q, k, weights",
                    before="index_scores = self._compute_index_scores(q, weights, k)",
                ),
            ),
            mark="",
        ),
        Edit(
            target=TARGET,
            pins={"0.16.1": "1a94be7b8a955f97"},
            edit=in_order(
                inserting(CAUSAL, after="qr = qr.detach()"),
                replacing(f"index_scores, topk_indices = {SCORES}", KEYS_AND_LOSS),
                replacing(
                    LOSS_OF_SCORES,
                    f"if indexer_loss is None:\n{indent(LOSS_OF_SCORES.strip(), '    ')}",
                ),
            ),
            helpers=(_cppmega_serves,),
            mark="cppmega_indexer",
        ),
    ),
    after=("dsa_indexer_loss_off",),
    reached="forward",
    when=lambda args: uses_dsa(args) and getattr(args, "dsa_kernel_backend", None) != "cudnn",
    feature=("megatron/core/transformer/experimental_attention_variant/dsa.py:DSAttention",),
    # TileLang's indexer has only the sparse loss; for the dense one, Megatron holds all scores.
    wanted_by=lambda recipe: (
        recipe.uses_tilelang
        and recipe.dsa_indexer_loss_coeff > 0
        and (recipe.dsa_dense_loss_steps > 0 or not recipe.dsa_indexer_use_sparse_loss)
    ),
    provides={"dsa_dense_indexer_loss": ("fused",)},
    rules=unsupported(
        LIMITS, {FP32: DECLINED, Part("{}", _too_wide, "at most 128 of 128"): DECLINED}
    ),
)


def fixed_upstream(source: Source) -> bool:
    text = source.text(TARGET)
    scores = ("fused_qk_topk_naive", "forward_with_scores")
    return bool(text) and not any(name in text for name in scores)


def verify() -> None:
    from unittest import mock

    import torch
    from megatron.core.transformer.enums import AttnMaskType

    from cppmega.ops import dsa_indexer

    from .._dsa_layer import layer

    torch.manual_seed(0)
    shapes = (6, 2, 2, 4), (6, 2, 4), (6, 2, 2)
    q, k, w = (torch.randn(shape, requires_grad=True) for shape in shapes)
    query, key, value = (torch.randn(6, 2, 3, 4, requires_grad=True) for _ in range(3))
    x = torch.randn(6, 2, 8)
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    index = torch.einsum("sbhd,tbd->bsht", q, k).relu()
    index = torch.einsum("bsht,sbh->bst", index, w).masked_fill(~causal, -torch.inf)
    best = index.sort(stable=True, descending=True).indices[..., :3]  # equal scores in order
    chosen = torch.zeros(2, 6, 6, dtype=torch.bool).scatter(-1, best, True) & causal
    scores = torch.einsum("sbhd,tbhd->bhst", query, key)

    def softmax_over(keys, scores):
        return scores.masked_fill(~keys, -torch.inf).softmax(-1)

    for sparse in (False, True):
        attention = layer(q, k, w, 3, dsa_indexer_use_sparse_loss=sparse)
        with mock.patch.object(dsa_indexer, "indexer_loss", wraps=dsa_indexer.indexer_loss) as op:
            output = attention(query, key, value, None, x, x, attn_mask_type=AttnMaskType.causal)
        assert op.call_count == 1, "the loss was computed by Megatron"
        got = torch.autograd.grad(output.sum(), (q, k, w), retain_graph=True)
        keys = chosen if sparse else causal.expand(2, 6, 6)
        target = softmax_over(keys.unsqueeze(1), scores).mean(1).detach()
        logs = softmax_over(keys, index).masked_fill(~keys, 1.0).log()
        want = torch.autograd.grad(-(target * logs).sum(-1).mean(), (q, k, w), retain_graph=True)
        for mine, other in zip(got, want, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    with mock.patch.object(dsa_indexer, "choose_keys", wraps=dsa_indexer.choose_keys) as op:
        attention.eval()(query, key, value, None, x, x, attn_mask_type=AttnMaskType.causal)
    assert op.call_count == 1, "the keys were selected by Megatron"
