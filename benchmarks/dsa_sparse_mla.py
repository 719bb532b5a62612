"""Compare fused sparse MLA at the widths of `dsa_sparse_mla_widths` with Megatron's unfused path.

usage: python -m benchmarks.dsa_sparse_mla --megatron ROOT [--out benchmarks/results]

ROOT holds a pristine megatron/ (an unpacked wheel); a copy is patched. Needs TileLang. Both paths
run in this process on the same inputs: causal top-k keys in any order, -1 where there are fewer.
Errors are relative L2 against fp64, divided by those of an fp32 computation on the same bf16 inputs
whose results are rounded to bf16. Writes dsa_sparse_mla_h200.json and .md.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import statistics
import tempfile
from collections.abc import Callable
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks import RESULTS
from benchmarks.harness import trees as sides
from benchmarks.harness.gpu import elapsed

PAGE = "dsa_sparse_mla_widths"
NAMES = ("out", "dq", "dkv")
CASES: dict[str, dict[str, Any]] = {
    "NAM56R": {"heads": 32, "widths": (128, 64), "sequence": 4096},
    "NAM56R, micro-batch 4": {"heads": 32, "widths": (128, 64), "sequence": 4096, "batch": 4},
    "8 heads (TP 4), ragged": {"heads": 8, "widths": (128, 64), "sequence": 500, "batch": 2},
    "peaked scores": {"heads": 32, "widths": (128, 64), "sequence": 512, "gain": 5.0},
    "192 and 128": {"heads": 32, "widths": (192, 128), "sequence": 512},
    "576 and 512, as released": {"heads": 64, "widths": (576, 512), "sequence": 512},
}
TOPK = 256

Tensors = tuple[torch.Tensor, ...]


def inputs(
    heads: int,
    widths: tuple[int, int],
    sequence: int,
    batch: int = 1,
    gain: float = 1.0,
    topk: int = TOPK,
) -> Tensors:
    """Query [s, b, h, w], key [s, b, 1, w], gradient [s, b, h, v] in bf16, indices [b, s, k]."""
    made = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made, device="cuda")

    query = (normal(sequence, batch, heads, widths[0]) * gain).bfloat16()
    key = normal(sequence, batch, 1, widths[0]).bfloat16()
    # Not uniform: rows differ in size by a factor of about 50.
    rows = torch.logspace(-1, 0.7, sequence, device="cuda")[:, None, None, None]
    grad = (normal(sequence, batch, heads, widths[1]) * rows).bfloat16()
    drawn = torch.rand(batch, sequence, sequence, generator=made, device="cuda").tril_()
    chosen = drawn.topk(topk).indices
    chosen = chosen.masked_fill(chosen > torch.arange(sequence, device="cuda")[:, None], -1)
    chosen[:, 7] = -1  # a row without keys
    order = torch.randperm(topk, generator=made, device="cuda")
    return query, key, grad, chosen[..., order]


def by_hand(
    query: torch.Tensor,
    key: torch.Tensor,
    grad: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    dtype: torch.dtype,
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


def errors(got: Tensors, want: Tensors) -> dict[str, float]:
    """Relative L2, by name."""
    found = {}
    for name, mine, true in zip(NAMES, got, want, strict=True):
        assert torch.isfinite(mine).all(), name
        found[name] = float((mine.double() - true).norm() / true.norm())
    return found


def over(found: dict[str, float], floor: dict[str, float]) -> dict[str, float]:
    """Errors as multiples of those of the floor."""
    return {part: round(found[part] / floor[part], 2) for part in NAMES}


def equal(first: Tensors, again: Tensors) -> list[str]:
    """Which of two runs' results are the same bit for bit."""
    return [n for n, a, b in zip(NAMES, first, again, strict=True) if torch.equal(a, b)]


def timed(step: Callable[[], Any], attempts: int = 20) -> tuple[float, float]:
    """Median milliseconds, and the peak in GiB above what was allocated before."""
    for _ in range(3):
        step()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held, found = torch.cuda.memory_allocated(), elapsed(step, repeats=attempts)
    return statistics.median(found), (torch.cuda.max_memory_allocated() - held) / 2**30


def measure(case: dict[str, Any], fused: Any, unfused: Any) -> dict[str, Any]:
    """Measure both paths on one case."""
    query, key, grad, indices = inputs(**case)
    width, value = case["widths"]
    scale = width**-0.5
    rows = torch.arange(query.size(0), device="cuda")
    causal = {"varlen_starts": torch.zeros_like(rows), "varlen_ends": rows + 1}

    def run(function: Callable[..., Any], **more: Any) -> Tensors:
        q, kv = query.detach().requires_grad_(), key.detach().requires_grad_()
        out = function(q, kv, indices, scale, value, **more)
        assert out is not None, "declined"
        return (out.detach(), *torch.autograd.grad(out, (q, kv), grad))

    true = by_hand(query, key, grad, indices, scale, torch.float64)
    low = by_hand(query, key, grad, indices, scale, torch.float32)
    floor = errors(tuple(part.bfloat16() for part in low), true)
    row: dict[str, Any] = {"batch": case.get("batch", 1), **case}
    ways = {
        "fused": lambda: run(fused),
        "unfused": lambda: run(unfused, key_positions=None, **causal),
    }
    for name, way in ways.items():
        first, again = way(), way()
        found = errors(first, true)
        milliseconds, peak = timed(way)
        row[name] = {
            "milliseconds": round(milliseconds, 3),
            "peak_gib": round(peak, 2),
            "error": {part: float(f"{found[part]:.3g}") for part in NAMES},
            "over_floor": over(found, floor),
            "repeats": equal(first, again),
        }
    return row


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        f"{result['gpu']}, torch {result['torch']}, tilelang {result['tilelang']}, megatron-core "
        f"{result['megatron-core']}, overlay {result['overlay']}, {result['date']}.",
        "",
        f"Forward and backward, {TOPK} keys a query. Errors of out, dq and dkv against fp64, as "
        "multiples of those of fp32 rounded to bf16.",
        "",
        "| case | heads | widths | s x b | unfused | fused | ratio | unfused errors "
        "| fused errors | fused repeats bitwise |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in result["cases"].items():
        old, new = row["unfused"], row["fused"]
        cells = [
            name,
            row["heads"],
            "/".join(map(str, row["widths"])),
            f"{row['sequence']} x {row['batch']}",
            *(f"{way['milliseconds']} ms, {way['peak_gib']} GiB" for way in (old, new)),
            f"{old['milliseconds'] / new['milliseconds']:.1f}",
            *(" ".join(f"{way['over_floor'][part]}" for part in NAMES) for way in (old, new)),
            ", ".join(new["repeats"]),
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run every case and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megatron", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()

    from cppmega.overlay import verbs as overlay
    from cppmega.overlay.verbs import Session
    from cppmega.rank import imported

    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "patched"
        sides.copy(options.megatron, root)
        session = Session(root)
        outcome = overlay.apply(session, only=[PAGE])
        assert outcome.ok, outcome.plan.failures
        imported.only_from(root)
        package = "megatron.core.transformer.experimental_attention_variant"
        fused = importlib.import_module(f"{package}.ops.tilelang_dsa").fused_sparse_mla_absorbed
        unfused = importlib.import_module(f"{package}.dsa")._unfused_absorbed_dsa_fn
        result: dict[str, Any] = {
            "date": date.today().isoformat(),
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "tilelang": metadata.version("tilelang"),
            "megatron-core": session.read_tree().version,
            "overlay": outcome.digest,
            "cases": {name: measure(case, fused, unfused) for name, case in CASES.items()},
        }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "dsa_sparse_mla_h200.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.out / "dsa_sparse_mla_h200.md").write_text(table(result))
    print(table(result))


if __name__ == "__main__":
    main()
