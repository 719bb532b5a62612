"""DSA's sparse attention on one GPU: ours, Megatron's paths and dense attention.

    python -m benchmarks.dsa_attention --megatron ROOT [--only NAME]

ROOT holds a pristine megatron/ (an unpacked wheel), of which a copy is patched. Everything that is
compared runs in one process on the same inputs: causal keys chosen at random in any order, -1 where
there are fewer. Errors of output and gradients are relative L2 against fp64, divided by those of an
fp32 computation on the same bf16 inputs whose results are rounded to bf16. Times are medians with
CUDA events, host time included; peaks are above the inputs.

The copy gets `dsa_sparse_mla_widths`, so that TileLang's kernels accept NAM56R's widths. Writes
dsa_attention_h200.json and .md; with --only, the cases whose name begins so are measured and the
others kept.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness import results, trees
from benchmarks.harness.gpu import distances, timed
from cppmega.ops.dsa_attention import sparse_attention

PACKAGE = "megatron.core.transformer.experimental_attention_variant"
PAGE = "dsa_sparse_mla_widths"
NAMES = ("out", "dq", "dkv")
NAM56R = {"heads": 32, "widths": (128, 64), "sequence": 4096, "topk": 256}
DEEPSEEK = {"heads": 128, "widths": (576, 512), "topk": 2048}
SMALL = {"sequence": 512, "topk": 256}
ALL_KEYS = ("stock", "dense", "dense, flash")
"""The ways that compute the scores of all keys."""
CASES: dict[str, dict[str, Any]] = {
    "NAM56R, b 1": NAM56R,
    "NAM56R, b 4": {**NAM56R, "batch": 4},
    "NAM56R, b 8": {**NAM56R, "batch": 8, "without": ("stock",)},
    "8 heads (TP 4), ragged": {**NAM56R, "heads": 8, "sequence": 500, "batch": 2},
    "24 heads, 96/32": {**SMALL, "heads": 24, "widths": (96, 32)},
    "scores of std 5": {**NAM56R, **SMALL, "gain": 5.0},
    "scores of std 30": {**NAM56R, **SMALL, "gain": 30.0},
    "a sink": {**NAM56R, "sequence": 2048, "sink": True},
    "192/128": {**SMALL, "heads": 32, "widths": (192, 128)},
    "576/512": {**SMALL, "heads": 64, "widths": (576, 512), "without": ("dense, flash",)},
    "DeepSeek-V3.2, 4k": {**DEEPSEEK, "sequence": 4096, "timed_only": True, "without": ALL_KEYS},
    "DeepSeek-V3.2, 32k": {**DEEPSEEK, "sequence": 32768, "timed_only": True, "without": ALL_KEYS},
    "a key per head, b 1": {**NAM56R, "key_heads": 32, "without": ("tilelang",)},
}
Tensors = tuple[Tensor, ...]
Way = Callable[[], Tensor]


def inputs(case: dict[str, Any]) -> Tensors:
    """Query [s, b, h, w], key [s, b, 1, w], gradient [s, b, h, v] in bf16, indices [b, s, k].

    Query and key are leaves of autograd; with `key_heads`, every head's key and value lie together.
    """
    made = torch.Generator("cuda").manual_seed(0)
    sequence, batch, topk = case["sequence"], case.get("batch", 1), case["topk"]
    width, value = case["widths"]

    def normal(*shape: int) -> Tensor:
        return torch.randn(sequence, batch, *shape, generator=made, device="cuda")

    query = (normal(case["heads"], width) * case.get("gain", 1.0)).bfloat16()
    key = normal(1, width).bfloat16()
    # Not uniform: rows differ in size by a factor of about 50.
    rows = torch.logspace(-1, 0.7, sequence, device="cuda")[:, None, None, None]
    grad = (normal(case["heads"], value) * rows).bfloat16()
    scores = torch.rand(batch, sequence, sequence, generator=made, device="cuda").tril_()
    chosen = scores.topk(topk).indices
    chosen = chosen.masked_fill(chosen > torch.arange(sequence, device="cuda")[:, None], -1)
    chosen[:, 7] = -1  # a row without keys
    indices = chosen[..., torch.randperm(topk, generator=made, device="cuda")]
    if case.get("sink"):  # a key that every query chose
        indices[indices == 0] = -1
        indices[..., 0] = 0
    if "key_heads" in case:
        made.manual_seed(1)
        key = normal(case["key_heads"], width + value).bfloat16()
    return query.requires_grad_(), key.requires_grad_(), grad, indices.int()


def by_hand(
    query: Tensor, key: Tensor, grad: Tensor, indices: Tensor, scale: float, dtype: torch.dtype
) -> Tensors:
    """Output and gradients over the gathered keys, 256 rows at a time."""
    value = grad.size(-1)
    out = torch.zeros_like(grad, dtype=dtype)
    dq, dkv = torch.zeros_like(query, dtype=dtype), torch.zeros_like(key, dtype=dtype)
    for b in range(query.size(1)):
        for rows in torch.arange(query.size(0), device="cuda").split(256):
            at, x, g = indices[b, rows], query[rows, b].to(dtype), grad[rows, b].to(dtype)
            keys = key[:, b, 0].to(dtype)[at.clamp(min=0)]
            scores = torch.einsum("shd,skd->shk", x, keys) * scale
            p = scores.masked_fill((at < 0)[:, None], -math.inf).softmax(-1).nan_to_num(0.0)
            out[rows, b] = o = torch.einsum("shk,skd->shd", p, keys[..., :value])
            dp = torch.einsum("shd,skd->shk", g, keys[..., :value])
            ds = p * (dp - (o * g).sum(-1, keepdim=True)) * scale
            dq[rows, b] = torch.einsum("shk,skd->shd", ds, keys)
            dk = torch.einsum("shk,shd->skd", ds, x)
            dk[..., :value] += torch.einsum("shk,shd->skd", p, g)
            dkv[:, b, 0].index_add_(0, at[at >= 0], dk[at >= 0])
    return out, dq, dkv


def truth_and_floor(case: dict[str, Any], tensors: Tensors) -> tuple[Tensors, dict[str, float]]:
    """Results in fp64, and the errors of those in fp32 that are rounded to bf16."""
    query, key, grad, indices = (x.detach() for x in tensors)
    given = (query, key, grad, indices.long(), case["widths"][0] ** -0.5)
    true, low = (by_hand(*given, dtype) for dtype in (torch.float64, torch.float32))
    return true, distances(NAMES, (part.bfloat16() for part in low), true)


def ways(case: dict[str, Any], tensors: Tensors, megatron: dict[str, Any]) -> Iterator[Any]:
    """Name and call of each way to compute the output."""
    query, key, _, indices = tensors
    width, value = case["widths"]
    scale = width**-0.5
    rows = torch.arange(query.size(0), device="cuda")
    bounds = {"varlen_starts": torch.zeros_like(rows), "varlen_ends": rows + 1}
    if "key_heads" in case:
        parts = key[..., :width], key[..., width:]
        yield "ours", partial(sparse_attention, query, *parts, indices, scale)
        stock = partial(megatron["per head"], query, *parts, indices, scale, **bounds)
        yield "stock", lambda: stock().view(*query.shape[:3], value)
        yield "dense", partial(dense, query, *parts, scale)
        return
    ours = partial(sparse_attention, query, key, value, indices, scale)
    yield "ours", ours
    yield "ours, deterministic", partial(ours, repeatable=True)
    yield "tilelang", partial(megatron["tilelang"], query, key, indices, scale, value)
    yield "stock", partial(megatron["absorbed"], query, key, indices, scale, value, **bounds)
    yield "dense", partial(dense, query, key, key[..., :value], scale)
    yield "dense, flash", partial(flash, query, key, key[..., :value], scale)


def dense(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention to all keys, by the fastest backend of torch."""
    shape = query.shape[:3]
    q, k, v = (x.expand(*shape, x.size(3)).permute(1, 2, 0, 3) for x in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    return out.permute(2, 0, 1, 3)


def flash(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """The same by FlashAttention 2, which takes one width: zeros make the value as wide."""
    padded = torch.nn.functional.pad(value, (0, query.size(3) - value.size(3)))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return dense(query, key, padded, scale)[..., : value.size(3)]


def measure(case: dict[str, Any], megatron: dict[str, Any]) -> dict[str, Any]:
    tensors = inputs(case)
    of_one_key = not case.get("timed_only") and "key_heads" not in case
    truth = truth_and_floor(case, tensors) if of_one_key else None
    row: dict[str, Any] = {}
    for name, way in ways(case, tensors, megatron):
        if name not in case.get("without", ()):
            try:
                row[name] = _of_way(way, tensors, None if "dense" in name else truth)
            except (torch.OutOfMemoryError, NotImplementedError) as error:
                row[name] = {"failed": str(error).split(".")[0]}
            torch.cuda.empty_cache()
    return row


def _of_way(way: Way, tensors: Tensors, truth: Any) -> dict[str, Any]:
    query, key, grad, _ = tensors

    def both() -> Tensors:
        out = way()
        if out is None:
            raise NotImplementedError("declined")
        return (out.detach(), *torch.autograd.grad(out, (query, key), grad))

    first = both()
    row: dict[str, Any] = {}
    if truth is not None and first[0].shape == truth[0][0].shape:
        true, floor = truth
        assert all(torch.isfinite(part).all() for part in first)
        errors, pairs = distances(NAMES, first, true), zip(NAMES, first, both(), strict=True)
        row["over_floor"] = {part: round(errors[part] / floor[part], 2) for part in NAMES}
        row["repeats"] = [name for name, one, other in pairs if torch.equal(one, other)]
    del first
    with torch.no_grad():
        row["forward"] = timed(way)
    row["both"] = timed(both)
    backward = partial(torch.autograd.grad, way(), (query, key), grad, retain_graph=True)
    return row | {"backward": timed(backward)}


def _cells(result: dict[str, Any]) -> Iterator[str | list[Any]]:
    for name, row in result["cases"].items():
        for way, found in row.items():
            if "failed" in found:
                yield f"| {name} | {way} | {found['failed']} ||||||"
                continue
            parts = ("both", "forward", "backward")
            times, ours = ([of[x]["milliseconds"] for x in parts] for of in (found, row["ours"]))
            ratios = " / ".join(f"{t / o:.2f}" for t, o in zip(times, ours, strict=True))
            yield [
                *(name, way, *times[1:], times[0], found["both"]["peak_gib"]),
                " ".join(map(str, found.get("over_floor", {}).values())),
                ", ".join(found.get("repeats", ())),
                "" if way == "ours" else ratios,
            ]


def table(result: dict[str, Any]) -> str:
    stack = results.versions(result, "torch", "triton", "tilelang", "megatron-core")
    columns = ["case", "way", "forward", "backward", "both", "peak GiB", "errors"]
    return results.page(
        f"{result['gpu']}, {stack}, {result['date']}.",
        "Milliseconds of forward, backward and both (with gradients), host time included; errors "
        "of out, dq and dkv against fp64 as multiples of those of fp32 rounded to bf16; speedup of "
        "ours (forward and backward together; then each alone).",
        results.table([*columns, "repeats bitwise", "ours is faster by"], _cells(result)),
    )


@click.command(help=__doc__)
@results.folder_option("--megatron", "a pristine megatron/", required=True)
@results.out_option()
@click.option("--only", default="", help="measure only cases whose names begin so")
def main(megatron: Path, out: Path, only: str) -> None:
    name = "dsa_attention_h200"
    cases = results.read(out, name).get("cases", {}) if only else {}
    with trees.overlaid(megatron, [PAGE]) as overlay:
        dsa = importlib.import_module(f"{PACKAGE}.dsa")
        hooks = importlib.import_module(f"{PACKAGE}.ops.tilelang_dsa")
        theirs = {
            "tilelang": hooks.fused_sparse_mla_absorbed,
            "absorbed": dsa._unfused_absorbed_dsa_fn,
            "per head": dsa.unfused_dsa_fn,
        }
        result = {**results.facts("torch", "triton", "tilelang"), **overlay}
        for each, case in CASES.items():
            if each.startswith(only):
                cases[each] = measure(case, theirs)
                result["cases"] = {one: cases[one] for one in CASES if one in cases}
                results.write(out, name, result, table(result))


if __name__ == "__main__":
    main()
