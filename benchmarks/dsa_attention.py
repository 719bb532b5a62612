"""DSA's sparse attention on one GPU: our kernels against Megatron's paths and dense attention.

usage: python -m benchmarks.dsa_attention --megatron ROOT [--out benchmarks/results] [--only NAME]

ROOT holds a pristine megatron/ (an unpacked wheel); a copy gets `dsa_sparse_mla_widths`, so that
TileLang's kernels accept NAM56R's widths. TileLang must be installed. All ways run in this process
on the same inputs: causal keys chosen at random, -1 where there are fewer. Before any time, output
and gradients are compared with fp64: relative L2 errors, divided by those of an fp32 computation on
the same inputs whose results are rounded to bf16. Medians of 10 with CUDA events, host time
included; peaks are above the inputs. Writes dsa_attention_h200.json and .md; with --only, the cases
whose name begins so are measured and the others kept as they are in the file.
"""

from __future__ import annotations

import argparse
import importlib
import json
import tempfile
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import RESULTS
from benchmarks import dsa_sparse_mla as yardstick
from benchmarks.harness import trees as sides
from cppmega.ops.dsa_attention import sparse_attention

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
ATTEMPTS = 10


class DeclinedError(Exception):
    """A way does not do a case."""


Tensors = tuple[torch.Tensor, ...]
Way = Callable[[], torch.Tensor]


def inputs(case: dict[str, Any]) -> Tensors:
    """Query, key, gradient of the output in bf16, and indices; leaves of autograd."""
    names = ("heads", "widths", "sequence", "batch", "gain", "topk")
    query, key, grad, indices = yardstick.inputs(**{n: case[n] for n in names if n in case})
    if case.get("sink"):  # a key that every query chose
        indices[indices == 0] = -1
        indices[..., 0] = 0
    if "key_heads" in case:
        made = torch.Generator("cuda").manual_seed(1)
        shape = (case["sequence"], case.get("batch", 1), case["key_heads"])
        width, value = case["widths"]
        key = torch.randn(*shape, width + value, generator=made, device="cuda").bfloat16()
    return query.requires_grad_(), key.requires_grad_(), grad, indices.int()


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


def dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """Causal attention to all keys, by the fastest backend of torch."""
    shape = query.shape[:3]
    q, k, v = (x.expand(*shape, x.size(3)).permute(1, 2, 0, 3) for x in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    return out.permute(2, 0, 1, 3)


def flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """The same by FlashAttention 2, which takes one width: zeros make the value as wide."""
    padded = torch.nn.functional.pad(value, (0, query.size(3) - value.size(3)))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return dense(query, key, padded, scale)[..., : value.size(3)]


def timed(call: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds, and the peak in GiB above what was allocated before."""
    milliseconds, peak = yardstick.timed(call, ATTEMPTS)
    return {"milliseconds": round(milliseconds, 3), "peak_gib": round(peak, 2)}


def measure(case: dict[str, Any], megatron: dict[str, Any]) -> dict[str, Any]:
    """Measure all ways of one case."""
    tensors = inputs(case)
    query, key, grad, indices = tensors
    floor = true = None
    if not case.get("timed_only") and "key_heads" not in case:
        scale = case["widths"][0] ** -0.5
        data = (query.detach(), key.detach(), grad, indices.long())
        true = yardstick.by_hand(*data, scale, torch.float64)
        low = yardstick.by_hand(*data, scale, torch.float32)
        floor = yardstick.errors(tuple(part.bfloat16() for part in low), true)
        del low
    row: dict[str, Any] = {}
    for name, way in ways(case, tensors, megatron):
        if name not in case.get("without", ()):
            try:
                row[name] = _of_way(way, tensors, None if "dense" in name else true, floor)
            except (torch.OutOfMemoryError, DeclinedError) as error:
                row[name] = {"failed": str(error).split(".")[0]}
            torch.cuda.empty_cache()
    return row


def _of_way(way: Way, tensors: Tensors, true: Any, floor: Any) -> dict[str, Any]:
    query, key, grad, _ = tensors

    def both() -> Tensors:
        out = way()
        if out is None:
            raise DeclinedError("declined")
        return (out.detach(), *torch.autograd.grad(out, (query, key), grad))

    first = both()
    row: dict[str, Any] = {}
    if true is not None and first[0].shape == true[0].shape:
        row["over_floor"] = yardstick.over(yardstick.errors(first, true), floor)
        row["repeats"] = yardstick.equal(first, both())
    del first
    with torch.no_grad():
        row["forward"] = timed(way)
    row["both"] = timed(both)
    out = way()
    backward = partial(torch.autograd.grad, out, (query, key), grad, retain_graph=True)
    row["backward"] = timed(backward)
    return row


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        f"{result['gpu']}, torch {result['torch']}, triton {result['triton']}, tilelang "
        f"{result['tilelang']}, megatron-core {result['megatron-core']}, {result['date']}.",
        "",
        "Milliseconds of forward, backward and both (with gradients), host time included; errors "
        "of out, dq and dkv against fp64 as multiples of those of fp32 rounded to bf16; speedup of "
        "ours (forward and backward together; then each alone).",
        "",
        "| case | way | forward | backward | both | peak GiB | errors | repeats bitwise | ours is "
        "faster by |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in result["cases"].items():
        for way, found in row.items():
            if "failed" in found:
                lines.append(f"| {name} | {way} | {found['failed']} ||||||")
                continue
            times = [found[part]["milliseconds"] for part in ("forward", "backward", "both")]
            ours = [row["ours"][part]["milliseconds"] for part in ("both", "forward", "backward")]
            ratios = [t / o for t, o in zip((times[2], times[0], times[1]), ours, strict=True)]
            cells = [
                name,
                way,
                *times,
                found["both"]["peak_gib"],
                " ".join(map(str, found.get("over_floor", {}).values())),
                ", ".join(found.get("repeats", ())),
                "" if way == "ours" else " / ".join(f"{ratio:.2f}" for ratio in ratios),
            ]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the cases and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megatron", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--only", default="", metavar="NAME")
    options = parser.parse_args()

    from cppmega.overlay import verbs as overlay
    from cppmega.overlay.verbs import Session
    from cppmega.rank import imported

    options.out.mkdir(parents=True, exist_ok=True)
    target = options.out / "dsa_attention_h200.json"
    cases = json.loads(target.read_text())["cases"] if options.only and target.is_file() else {}
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "patched"
        sides.copy(options.megatron, root)
        session = Session(root)
        outcome = overlay.apply(session, only=[yardstick.PAGE])
        assert outcome.ok, outcome.plan.failures
        imported.only_from(root)
        package = "megatron.core.transformer.experimental_attention_variant"
        dsa = importlib.import_module(f"{package}.dsa")
        hooks = importlib.import_module(f"{package}.ops.tilelang_dsa")
        megatron = {
            "tilelang": hooks.fused_sparse_mla_absorbed,
            "absorbed": dsa._unfused_absorbed_dsa_fn,
            "per head": dsa.unfused_dsa_fn,
        }
        result: dict[str, Any] = {
            "date": date.today().isoformat(),
            "gpu": torch.cuda.get_device_name(),
            **{name: metadata.version(name) for name in ("torch", "triton", "tilelang")},
            "megatron-core": session.read_tree().version,
        }
        for name, case in CASES.items():
            if name.startswith(options.only):
                cases[name] = measure(case, megatron)
                print(f"{name}: {json.dumps(cases[name])}", flush=True)
            result["cases"] = {name: cases[name] for name in CASES if name in cases}
            target.write_text(json.dumps(result, indent=1) + "\n")
    target.with_suffix(".md").write_text(table(result))
    print(table(result))


if __name__ == "__main__":
    main()
