"""One row for each public op: its tensors, and a call of its kernels, for `test_layouts`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cppmega.ops import (
    dsa_attention,
    dsa_indexer,
    linear_cross_entropy,
    m2rnn,
    mhc,
    ngram_hash,
    packed_conv,
)
from cppmega.ops.common.bounds import Bounds
from cppmega.ops.dsa_indexer import dense_triton as dense
from cppmega.ops.dsa_indexer import tiles_triton as tiles
from cppmega.ops.dsa_indexer import topk_triton as topk
from cppmega.ops.dsa_indexer.problem import Loss
from cppmega.ops.linear_cross_entropy import kernels_triton as linear_ce_triton
from cppmega.ops.linear_cross_entropy import naive as linear_ce_reference
from cppmega.ops.mamba3 import autograd as mamba3_scan_autograd
from cppmega.ops.mamba3.naive import Inputs, Parameters
from cppmega.ops.pointwise import (
    dsa_indexer_prologue,
    hadamard_triton,
    mla_heads,
    rope,
    router_gating,
)
from cppmega.ops.pointwise.grouped_linear import grouped_linear
from cppmega.ops.pointwise.linear import linear, padded_linear
from cppmega.ops.pointwise.split_columns import split_columns
from cppmega.ops.pointwise.weighted_gelu import weighted_gelu
from tests.ops.layouts import EXPANDED, LAYOUTS
from tests.ops.pointwise.test_grouped_linear import products

Tensors = dict[str, Tensor]
Layout = Callable[[Tensor], Tensor]
TOPK = 3
SB = {"s": 4, "b": 2}
HKV = {"h": 2, "k": 5, "v": 3}


class Row(NamedTuple):
    """How to call an op.

    Attributes:
        ops: the public functions, as module and name.
        sizes: the size of each dimension that a test changes.
        empty: those that may be 0.
        make: tensors of these sizes, by the arguments of `call`.
        call: the op; None in its results stands for what it does not return.
        turns: how many assignments of layouts to tensors a CPU tries; a GPU tries all.
    """

    ops: tuple[str, ...]
    sizes: dict[str, int]
    empty: tuple[str, ...]
    make: Callable[..., Tensors]
    call: Callable[..., Any]
    turns: int = 5


def as_on_a_gpu() -> None:
    """Let ops run their kernels on a CPU, in Triton's interpreter, with tiles for small tensors."""
    for module in (dsa_attention, dsa_indexer, dsa_indexer_prologue):
        module.obstacle = lambda *_: None  # type: ignore[attr-defined]
    linear_cross_entropy._triton_obstacle = lambda *_: None  # type: ignore[assignment]
    for product in ("hidden_gradient", "weight_gradient"):  # a CPU's have no `out_dtype`
        setattr(linear_ce_triton, product, getattr(linear_ce_reference, product))
    tiles.TILE = dense.BLOCK = 16
    small = topk.Launch(columns=16, keys=16, chunk=16, programs=1)
    topk.launch_for = lambda heads, width: small


class Draw:
    """Random tensors on a device, in the type that the kernels take there."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.kind = torch.float32 if device == "cpu" else torch.bfloat16
        self.generator = torch.Generator().manual_seed(5)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(*shape, generator=self.generator) * scale
        return drawn.to(self.device, dtype or self.kind)

    def fp32(self, *shape: int, scale: float = 1.0) -> Tensor:
        return self(*shape, dtype=torch.float32, scale=scale)

    def below(self, most: int, *shape: int) -> Tensor:
        drawn = torch.rand(*shape, generator=self.generator) * most
        return drawn.long().to(self.device)


def _bounds(draw: Draw, s: int, b: int, t: int) -> Tensors:
    ends = draw.below(t + 1, b, s)
    return {"starts": draw.below(3, s), "ends": ends}


def _index(draw: Draw, s: int, b: int, t: int, h: int = 2, d: int = 16) -> Tensors:
    tensors = {"q": draw(s, b, h, d), "k": draw(t, b, d), "weights": draw(s, b, h)}
    return {**tensors, **_bounds(draw, s, b, t)}


def _choose(starts: Tensor, ends: Tensor, **tensors: Tensor) -> Tensor:
    return dsa_indexer.choose_keys(**tensors, topk=TOPK, bounds=Bounds(starts, ends))


def _indexer(sparse: bool, key_heads: int, topk: int = TOPK) -> Row:
    def make(draw: Draw, s: int, b: int, t: int, heads: int) -> Tensors:
        attention = {"query": draw(s, b, heads, 16), "key": draw(t, b, key_heads, 16)}
        return {**_index(draw, s, b, t), **attention, "rows": draw.below(2, b, s).bool()}

    def call(starts: Tensor, ends: Tensor, **tensors: Tensor) -> Any:
        loss = Loss(softmax_scale=0.3, coefficient=0.7, sparse=sparse)
        return dsa_indexer.indexer_loss(
            **tensors, topk=topk, loss=loss, bounds=Bounds(starts, ends)
        )

    sizes = {"s": 5, "b": 2, "t": 6, "heads": 2}
    empty = ("s", "b", "t", *(["heads"] if key_heads == 1 else []))
    return Row(("dsa_indexer.indexer_loss",), sizes, empty, make, call, turns=2)


def _attention(heads: int, value: int, rotary: int, absorbed: bool, turns: int = 2) -> Row:
    def make(draw: Draw, s: int, b: int, t: int, topk: int) -> Tensors:
        tensors = {
            "query": draw(s, b, heads, value + rotary),
            "key": draw(t, b, 1 if absorbed else heads, value + rotary),
            "indices": torch.rand(b, s, t + topk, generator=draw.generator)
            .argsort(-1)[..., :topk]
            .to(draw.device),
        }
        if not absorbed:
            tensors["value"] = draw(t, b, heads, value)
        return {**tensors, **_bounds(draw, s, b, t)}

    def call(starts: Tensor, ends: Tensor, **tensors: Any) -> Tensor:
        bounds = Bounds(starts, ends)
        return dsa_attention.sparse_attention(
            **({"value": value} | tensors), softmax_scale=0.3, bounds=bounds
        )

    sizes = {"s": 3, "b": 2, "t": 6, "topk": TOPK}
    return Row(
        ("dsa_attention.sparse_attention",), sizes, ("s", "b", "t", "topk"), make, call, turns=2
    )


def _prologue(draw: Draw, s: int, b: int) -> Tensors:
    tensors = {"q": draw(s, b, 2, 16), "k": draw(s, b, 16), "weights": draw(s, b, 2)}
    return {**tensors, "angles": draw.fp32(s, 1, 1, 8).cumsum(0)}


def _prepared(q: Tensor, k: Tensor, weights: Tensor, angles: Tensor) -> Any:
    rotary = dsa_indexer_prologue.Rotary(angles=angles.detach())
    return dsa_indexer_prologue.prepare_index_inputs(q, k, weights, rotary)


def _site(draw: Draw, s: int, b: int, n: int = 2, c: int = 16) -> Tensors:
    values = n * n + 2 * n
    scales = {name: draw.fp32(1) for name in ("alpha_pre", "alpha_post", "alpha_res")}
    return {
        "streams": draw(s, b, n, c),
        "phi": draw.fp32(values, n * c, scale=0.2),
        **scales,
        "bias": draw.fp32(values),
        "out": draw(s, b, c),
        "out_bias": draw(c),
    }


def _of_site(
    streams: Tensor, out: Tensor, out_bias: Tensor, *, fused: bool, **given: Tensor
) -> Any:
    parameters = mhc.Parameters(**given)
    if fused:
        seen, site = mhc.read(streams, parameters, 2)
        return seen, mhc.write(site, out, out_bias)
    h_pre, h_post, h_res = mhc.weights(streams, parameters, 2)
    return mhc.aggregate(streams, h_pre), mhc.update(streams, h_res, h_post, out, out_bias)


def _mamba3(draw: Draw, b: int, l: int) -> Tensors:  # noqa: E741
    h, g, r, n, p = 2, 1, 2, 32, 16
    inputs = Inputs(
        *(draw(b, l, h, p), draw(b, l, h, p), draw(b, l, g, r, n), draw(b, l, g, r, n)),
        *(draw(b, l, h), draw(b, l, h), draw(b, l, h), draw(b, l, n // 4)),
    )
    norms = {"key_norm": draw(n), "query_norm": draw(n)}
    ranks = {name: draw.fp32(h, r, p) for name in ("rank_x", "rank_z", "rank_out")}
    biases = {name: draw.fp32(h, r, n) for name in ("key_bias", "query_bias")}
    learned = {"dt_bias": draw.fp32(h), "d": draw.fp32(h), **biases, **norms, **ranks}
    return {**inputs._asdict(), **learned}


def _mixed(**tensors: Tensor) -> Tensor:
    inputs = Inputs(*(tensors.pop(name) for name in Inputs._fields))
    return mamba3_scan_autograd.mixed(inputs, Parameters(**tensors), "softplus", None)


def _m2rnn(draw: Draw, s: int, b: int, h: int, k: int, v: int) -> Tensors:
    tensors = {"q": draw(s, b, k), "k": draw(s, b, k), "v": draw(s, b, h, v)}
    return {**tensors, "transition": draw(h, v, v), "log_decay": -draw.fp32(s, b, h).abs()}


def _packs(op: str, of: Callable[..., Tensors], call: Callable[..., Tensor], **sizes: int) -> Row:
    """An op with one sequence of documents."""

    def make(draw: Draw, s: int, **others: int) -> Tensors:
        return {
            **of(draw, s=s, b=1, **others),
            "bounds": torch.arange(2).clamp(max=s).to(draw.device),
        }

    def packed(bounds: Tensor, **tensors: Tensor) -> Tensor:
        s = len(next(iter(tensors.values())))
        return call(**tensors, bounds=m2rnn.document_bounds(bounds, s))

    return Row((op,), {"s": 3, **sizes}, ("s",), make, packed, turns=2)


def _conv(draw: Draw, s: int, b: int, c: int) -> Tensors:
    return {"x": draw(s, b, c), "weight": draw(c, 2), "bias": draw(c)}


def _losses(upstream: Any) -> Row:
    def make(draw: Draw, s: int, b: int, width: int) -> Tensors:
        tensors = {
            "hidden": draw(s, b, width),
            "weight": draw(12, width),
            "targets": draw.below(12, s, b),
        }
        return tensors | ({"loss_weights": draw.below(4, s, b) / 4} if upstream else {})

    def call(**tensors: Tensor) -> Tensor:
        how = {"upstream": "weighted-scalar", "counted_tokens": 8} if upstream else {}
        found = linear_cross_entropy.linear_cross_entropy(
            **tensors, **how, backend="triton", return_argmax=True
        )
        return (
            (found.loss * tensors["loss_weights"]).sum()[None] if upstream else found.loss,
            found.argmax,
        )  # type: ignore[return-value]

    return Row(
        ("linear_cross_entropy.linear_cross_entropy",),
        {**SB, "width": 8},
        ("s", "b", "width"),
        make,
        call,
    )


def _table(draw: Draw, s: int, b: int, rows: int, dim: int) -> Tensors:
    return {"tables": draw(rows, dim), "rows": draw.below(rows + 1, s, b)}


def _hashed(tokens: Tensor, starts: Tensor) -> Tensor:
    with_ = ngram_hash.hashing((2, 3), 1, (11, 13), seed=3).to(tokens.device)
    return ngram_hash.table_rows(tokens, starts, with_)


def _rotated(t: Tensor, angles: Tensor) -> Tensor:
    return rope.rotated(t, angles.detach())


def _heads(q: Tensor, kv: Tensor, k_pos: Tensor, angles: Tensor) -> Any:
    return mla_heads.query_key_value(q, kv, k_pos, angles.detach())


def _transformed(x: Tensor) -> Tensor:
    from cppmega.ops.pointwise.hadamard import walsh_hadamard

    return walsh_hadamard(x, 0.5) if x.is_cuda else hadamard_triton.transform(x.detach(), 0.5)


def _experts(draw: Draw, tokens: int) -> Tensors:
    weights = {f"weight_{i}": draw(5, 4) for i in range(2)}
    return {"x": draw(2 * tokens, 4), **weights}


def _grouped(x: Tensor, **weights: Tensor) -> Tensor:
    return grouped_linear(x, [len(x) // 2] * 2, list(weights.values()), products)


ROWS: dict[str, Row] = {
    "choose_keys": Row(
        ("dsa_indexer.choose_keys",), {"s": 5, "b": 2, "t": 6}, ("s", "b", "t"), _index, _choose
    ),
    "indexer_loss_dense": _indexer(sparse=False, key_heads=2),
    "indexer_loss_dense_latent": _indexer(sparse=False, key_heads=1),
    "indexer_loss_no_keys_chosen": _indexer(sparse=True, key_heads=1, topk=0),
    "indexer_loss_sparse": _indexer(sparse=True, key_heads=1),
    "indexer_loss_sparse_per_head": _indexer(sparse=True, key_heads=2),
    "attention_absorbed": _attention(2, 16, 16, absorbed=True),
    "attention_wide": _attention(2, 256, 64, absorbed=True, turns=1),
    "attention_per_head": _attention(2, 16, 16, absorbed=False),
    "prologue": Row(
        ("dsa_indexer_prologue.prepare_index_inputs",), SB, ("s", "b"), _prologue, _prepared
    ),
    "mhc_read_write": Row(
        ("mhc.read", "mhc.write"), SB, ("s", "b"), _site,
        lambda **tensors: _of_site(**tensors, fused=True), turns=2,
    ),
    "mhc_weights_aggregate_update": Row(
        ("mhc.weights", "mhc.aggregate", "mhc.update"), SB, ("s", "b"), _site,
        lambda **tensors: _of_site(**tensors, fused=False), turns=2,
    ),
    "mhc_sinkhorn": Row(
        ("mhc.sinkhorn",), SB, ("s", "b"), lambda draw, s, b: {"logits": draw.fp32(s, b, 2, 2)},
        lambda logits: mhc.sinkhorn(logits, 2),
    ),
    "m2rnn": Row(
        ("m2rnn.m2rnn",), {"s": 3, "b": 2, **HKV}, ("s", "b", *HKV), _m2rnn, m2rnn.m2rnn
    ),
    "m2rnn_packs": _packs("m2rnn.m2rnn", _m2rnn, m2rnn.m2rnn, **HKV),
    "packed_conv": Row(
        ("packed_conv.packed_conv",), {**SB, "c": 3}, ("s", "b", "c"), _conv,
        packed_conv.packed_conv,
    ),
    "packed_conv_packs": _packs("packed_conv.packed_conv", _conv, packed_conv.packed_conv, c=3),
    "mamba3": Row(("mamba3.mixed",), {"b": 2, "l": 3}, ("b", "l"), _mamba3, _mixed, turns=1),
    "linear_cross_entropy": _losses(None),
    "linear_cross_entropy_weighted": _losses("weighted-scalar"),
    "ngram_lookup": Row(
        ("ngram_hash.lookup",), {**SB, "rows": 5, "dim": 8}, ("s", "b", "dim"), _table,
        ngram_hash.lookup,
    ),
    "ngram_rows": Row(
        ("ngram_hash.table_rows",), SB, ("s", "b"),
        lambda draw, s, b: {"tokens": draw.below(50, b, s), "starts": draw.below(2, b, s).bool()},
        _hashed,
    ),
    "rope": Row(
        ("rope.rotated",), {**SB, "h": 2}, ("s", "b", "h"),
        lambda draw, s, b, h: {"t": draw(s, b, h, 6), "angles": draw.fp32(s, 1, 1, 4)}, _rotated,
    ),
    "mla_heads": Row(
        ("mla_heads.query_key_value",), {**SB, "h": 2}, ("s", "b", "h"),
        lambda draw, s, b, h: {
            "q": draw(s, b, h, 9), "kv": draw(s, b, h, 8), "k_pos": draw(s, b, 1, 6),
            "angles": draw.fp32(s, 1, 1, 4),
        },
        _heads,
    ),
    "router_gating": Row(
        ("router_gating.gradients",), {"tokens": 5, "experts": 3}, ("tokens", "experts"),
        lambda draw, tokens, experts: {
            "inp": draw(tokens, 8, dtype=torch.float16), "weight": draw.fp32(experts, 8),
            "given": draw.fp32(tokens, experts),
        },
        router_gating.gradients,
    ),
    "weighted_gelu": Row(
        ("weighted_gelu.weighted_gelu",), {"rows": 5, "width": 3}, ("rows", "width"),
        lambda draw, rows, width: {"x": draw(rows, width), "weights": draw.fp32(rows, 1)},
        weighted_gelu,
    ),
    "hadamard": Row(
        ("hadamard.walsh_hadamard",), SB, ("s", "b"), lambda draw, s, b: {"x": draw(s, b, 8)},
        _transformed,
    ),
    "split_columns": Row(
        ("split_columns.split_columns",), SB, ("s", "b"),
        lambda draw, s, b: {"projected": draw(s, b, 7)},
        lambda projected: split_columns(projected, (4, 0, 3)),
    ),
    "linear": Row(
        ("linear.linear",), {**SB, "k": 4}, ("s", "b", "k"),
        lambda draw, s, b, k: {"x": draw(s, b, k), "weight": draw(3, k)}, linear,
    ),
    "padded_linear": Row(
        ("linear.padded_linear",), {**SB, "k": 4}, ("s", "b", "k"),
        lambda draw, s, b, k: {"x": draw(s, b, k), "weight": draw(3, k)}, padded_linear,
    ),
    "grouped_linear": Row(
        ("grouped_linear.grouped_linear",), {"tokens": 3}, ("tokens",), _experts, _grouped
    ),
}  # fmt: skip


def _laid_out(tensors: Tensors, layouts: dict[str, Layout], turn: int) -> Tensors:
    """Each tensor in a layout of its own, all with gradients where they may have some."""
    found = {}
    for at, (name, x) in enumerate(tensors.items()):
        several = list(layouts.values())
        if x.ndim == 1 and "sliced" in layouts:
            several = [layouts["sliced"]]  # the others leave a vector contiguous
        laid = several[(at + turn) % len(several)](x).detach()
        found[name] = laid.requires_grad_(x.is_floating_point())
    return found


def results(row: Row, tensors: Tensors, layout: Layout) -> list[Tensor]:
    """What an op returns, and the gradients of its arguments, from upstream ones of a layout."""
    found = row.call(**tensors)
    found = [x for x in (found if isinstance(found, tuple) else (found,)) if x is not None]
    outs = [x for x in found if x.requires_grad]
    generator = torch.Generator().manual_seed(11)
    upstream = []
    for out in outs:
        drawn = torch.randn(out.shape, generator=generator).to(out.device, out.dtype)
        upstream.append(layout(drawn) if out.ndim else drawn)
    leaves = [x for x in tensors.values() if x.requires_grad]
    gradients = torch.autograd.grad(outs, leaves, upstream, allow_unused=True) if outs else ()
    results = [x.detach() for x in (*found, *gradients) if x is not None]
    assert all(x.isfinite().all() for x in results), "a result is not finite"
    return results


def _contiguous(x: Tensor) -> Tensor:
    return x.contiguous().clone()


def check(name: str, device: str) -> None:
    """The results of any layout are those of contiguous tensors, and empty tensors have some."""
    row = ROWS[name]

    def tensors(**sizes: int) -> Tensors:
        return row.make(Draw(device), **(row.sizes | sizes))

    plain = {"contiguous": _contiguous}
    alone = {"b": 1} if "b" in row.sizes else {}
    far = {name: LAYOUTS[name] for name in ("ones far", "transposed")}
    for given, layouts in ((tensors(), LAYOUTS), (tensors(), EXPANDED), (tensors(**alone), far)):
        turns = len(layouts) if device != "cpu" else min(len(layouts), row.turns)
        wanted: list[Tensor] = []
        for turn in range(turns):
            laid = _laid_out(given, layouts, turn)
            if not wanted or layouts is EXPANDED:
                wanted = results(row, _laid_out(laid, plain, 0), _contiguous)
            several = list(LAYOUTS.values())
            found = results(row, laid, several[turn])
            for at, (one, other) in enumerate(zip(found, wanted, strict=True)):
                close = {"rtol": 1e-5, "atol": 1e-5} if other.dtype == torch.float32 else {}
                what = f"result {at} in turn {turn} of {list(layouts)}"
                torch.testing.assert_close(one, other, **close, msg=f"{what}: {one} {other}")
    for size in row.empty:
        results(row, _laid_out(tensors(**{size: 0}), plain, 0), _contiguous)
