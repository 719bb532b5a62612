"""Hyper-connections on one GPU: our ops and sites against other implementations.

usage: python -m benchmarks.mhc [--dev ROOT] [--out benchmarks/results] [--only NAME]...

At the first shape it also measures Megatron's branch dev, from a checkout at ROOT, with the kernels
that it selects on this GPU; Transformer Engine and Liger, if they are installed; and torch.compile
of the reference (`benchmarks/mhc_rivals.py`). All implementations of a shape run in one process on
the same inputs; the first calls, which compile and tune, are not counted. Results or gradients
that differ from the reference by more than the rounding of bf16 explains stop the run. (Against
fp64, `pytest -m gpu tests/ops/mhc/test_mhc.py` compares ours.)

Times are medians of 10 with CUDA events while the GPU has work queued, so that the host is not in
them: of a site forward plus backward, the sum of the streams' gradients included. The least time
is that of what a site has to move (45 streams `[s, b, C]` if n is 4) at the bandwidth of a copy on
this card. mhc_DEVICE.json and .md are rewritten after every implementation; with --only, they keep
what they contain of the other shapes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import RESULTS
from benchmarks.harness import gpu as on_gpu
from benchmarks.mhc_rivals import ITERATIONS, Inputs, Way, Ways, others, ours, own_ways, plain
from cppmega.ops import mhc
from tests.ops.mhc import checks
from tests.ops.mhc.checks import Shape

CASES = {
    "s 8192, b 4, n 4, C 7168": Shape(8192, 4, 4, 7168),
    "s 4096, b 8, n 4, C 4096": Shape(4096, 8, 4, 4096),
    "s 4096, b 8, n 2, C 4096": Shape(4096, 8, 2, 4096),
    "s 4096, b 4, n 8, C 4096": Shape(4096, 4, 8, 4096),
}
TOLERANCE = 2e-2
"""Relative L2 distance of two ways in bf16; others round the weights to bf16 as well."""

NAMES = (*checks.NAMES[:9],)

queued = partial(on_gpu.median, queued=True)

PUBLISHED = {
    "sinkhorn": (0.065, 0.133),
    "aggregate": (0.349, 0.661),
    "update": (0.684, 2.549),
    "weights": (0.426, 1.541),
}
"""Forward and backward of upstream's fused kernels by its own account, on Blackwell; its `weights`
is the projection alone."""


def bandwidth() -> float:
    """Bytes per millisecond that a copy reads and writes."""
    source = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.numel() / queued(lambda: target.copy_(source))


def unit(shape: Shape) -> int:
    """Bytes of one stream in bf16."""
    s, b, _, c = shape
    return s * b * c * 2


def units(n: int) -> dict[str, tuple[int, int]]:
    """Streams that each op has to read and write, forward and backward."""
    return {
        "weights": (n, 2 * n),
        "aggregate": (n + 1, 2 * n + 1),
        "update": (2 * n + 1, 3 * n + 2),
        "site": (4 * n + 2, 6 * n + 3),
    }


def large(shape: Shape) -> tuple[Inputs, Tensor]:
    """Inputs of so many tokens, of which some differ: drawing all takes minutes. And a bias."""
    drawn = 64
    few = checks.drawn(shape._replace(s=drawn), torch.bfloat16, device="cuda")
    times = shape.s // drawn
    streams, out = few.streams.repeat(times, 1, 1, 1), few.out.repeat(times, 1, 1)
    return Inputs(streams, *few.parameters, out), few.bias


def both_ways(
    way: Way, leaves: tuple[Tensor, ...], upstream: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Results and gradients in its own layout."""
    leaves = tuple(x.detach().requires_grad_() for x in leaves)
    found = way.call(*leaves)
    return [x.detach() for x in found], list(torch.autograd.grad(found, leaves, upstream))


def measure(shape: Shape, ways: Ways, times: dict[str, float], save: Callable[[], None]) -> None:
    """Put the milliseconds of each way into `times`; SystemExit if one is another function.

    Somebody else's way that raises an error is left out, and the error is printed.
    """
    given, of_out = large(shape)
    upstream = [torch.randn_like(given.streams), torch.randn_like(given.out)]
    exact = in_our_layout(Way(plain), given, upstream)
    for name, make in ways.items():
        try:
            way = make()
            found = in_our_layout(way, given, upstream)
        except Exception as error:
            if name.startswith("ours"):
                raise
            print(f"{name}: {error!r}"[:500], flush=True)
            continue
        for what, want, mine in zip(NAMES, exact, found, strict=True):
            distance = float((want.float() - mine.float()).norm() / want.float().norm())
            if distance > TOLERANCE and want.numel() > 1:
                raise SystemExit(f"{name} differs in {what}: {distance:.2e}")
        del found
        leaves, turned = own_inputs(way, given, upstream)
        times[name] = queued(both_ways, way, leaves, turned)
        print(f"{name}: {times[name]:.3f} ms", flush=True)
        save()
    if "ours" in ways:
        leaves = (*given, of_out)
        times["ours, with a bias"] = queued(both_ways, Way(ours), leaves, upstream)
        save()


def own_inputs(
    way: Way, given: Inputs, upstream: list[Tensor]
) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Leaves and upstream gradients in a way's own layout."""
    leaves = tuple(x.contiguous() for x in way.leaves(given))
    return leaves, [way.turned(upstream[0]).contiguous(), upstream[1]]


def in_our_layout(way: Way, given: Inputs, upstream: list[Tensor]) -> list[Tensor]:
    """Results and gradients."""
    (new, seen), gradients = both_ways(way, *own_inputs(way, given, upstream))
    d_streams, *others, d_out = gradients
    return [way.turned(new), seen, way.turned(d_streams), *way.parameters(others), d_out]


def measure_ops(shape: Shape, speed: float) -> dict[str, list[float]]:
    """Of each op of ours forward and backward: milliseconds, and its share of the bandwidth."""
    given, _ = large(shape)
    streams, out = given.streams, given.out
    kept = [x.detach() for x in mhc.weights(streams, given.parameters, ITERATIONS)]
    for leaf in (*given, *kept):
        leaf.requires_grad_()
    h_pre, h_post, h_res = kept
    logits = torch.randn_like(h_res, requires_grad=True)
    calls: dict[str, Callable[[], tuple[Tensor, ...]]] = {
        "sinkhorn": lambda: (mhc.sinkhorn(logits, ITERATIONS),),
        "weights": lambda: mhc.weights(streams, given.parameters, ITERATIONS),
        "aggregate": lambda: (mhc.aggregate(streams, h_pre),),
        "update": lambda: (mhc.update(streams, h_res, h_post, out),),
        "site": lambda: ours(*given),
    }
    needed = {
        "sinkhorn": [logits],
        "weights": list(given[:6]),
        "aggregate": [streams, h_pre],
        "update": [streams, h_res, h_post, out],
        "site": list(given),
    }
    found = {}
    for name, call in calls.items():
        results = call()
        upstream = [torch.randn_like(x) for x in results]
        backward = lambda r=results, n=name, u=upstream: torch.autograd.grad(  # noqa: E731
            r, needed[n], u, retain_graph=True
        )
        forward = queued(call)
        times = [forward, queued(backward)]
        least = [x * unit(shape) / speed for x in units(shape.n).get(name, ())]
        found[name] = times + [a / b for a, b in zip(least, times, strict=False)]
    return found


def site_table(sites: dict[str, dict[str, float]]) -> list[str]:
    """Milliseconds, and the ratio to ours."""
    names = list(dict.fromkeys(name for times in sites.values() for name in times))
    lines = ["", "| forward + backward | " + " | ".join(sites) + " |"]
    lines.append("|---" * (len(sites) + 1) + "|")
    for name in names:
        cells = [
            f"{times[name]:.3f} ({times[name] / times['ours']:.2f})"
            if name in times and "ours" in times
            else ""
            for times in sites.values()
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return [*lines, "", "Milliseconds, and in parentheses how many times ours that is."]


def op_table(ops: dict[str, dict[str, list[float]]]) -> list[str]:
    """Milliseconds forward / backward, and the share of the bandwidth."""
    lines = ["", "| op | " + " | ".join(ops) + " | published for Blackwell |"]
    lines.append("|---" * (len(ops) + 2) + "|")
    for name in next(iter(ops.values())):
        cells = []
        for found in ops.values():
            times, shares = found[name][:2], found[name][2:]
            share = " (" + ", ".join(f"{x:.0%}" for x in shares) + ")" if shares else ""
            cells.append(f"{times[0]:.3f} / {times[1]:.3f}{share}")
        other = " / ".join(f"{x:.3f}" for x in PUBLISHED.get(name, ()))
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {other} |")
    return [
        *lines,
        "",
        "Milliseconds forward / backward, and in parentheses the share of a copy's bandwidth that",
        "the least traffic of the op reaches. The last column is upstream's own account of its",
        "fused kernels on another GPU, where `weights` is the projection alone.",
    ]


def in_order(found: dict[str, Any]) -> dict[str, Any]:
    """Results by shape, in the order of the shapes rather than in that of their measurement."""
    return {name: found[name] for name in CASES if name in found}


def main() -> None:
    """Check, measure and write."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--dev", type=Path, help="a checkout of Megatron's branch dev")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--only", action="append", help="only shapes whose names begin with this")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name()
    stem = options.out / ("mhc_" + on_gpu.card(device))
    speed = bandwidth()
    report: dict[str, object] = {
        **on_gpu.stack("triton", "transformer-engine", "liger-kernel"),
        "bandwidth of a copy, TB/s": round(speed / 1e9, 2),
    }
    known: dict[str, Any] = {}
    if options.only and stem.with_suffix(".json").exists():
        known = json.loads(stem.with_suffix(".json").read_text())
    sites: dict[str, dict[str, float]] = known.get("sites", {})
    ops: dict[str, dict[str, list[float]]] = known.get("ops", {})

    def save() -> None:
        lines = [
            "# Hyper-connections in bf16: a site and its ops",
            "",
            "Written by `benchmarks/mhc.py`, after a comparison of results and gradients.",
            "",
            *(f"- {what}: {value}" for what, value in report.items()),
            *site_table(in_order(sites)),
            *op_table(in_order(ops)),
            "",
        ]
        found = {"sites": in_order(sites), "ops": in_order(ops)}
        whole = json.dumps(report | found, indent=1)
        stem.with_suffix(".json").write_text(whole + "\n")
        stem.with_suffix(".md").write_text("\n".join(lines))

    for number, (name, shape) in enumerate(CASES.items()):
        if options.only and not name.startswith(tuple(options.only)):
            continue
        print(name, flush=True)
        sites[name] = {"least": sum(units(shape.n)["site"]) * unit(shape) / speed}
        ops[name] = measure_ops(shape, speed)
        ways = own_ways() | (others(shape, options.dev) if number == 0 else {})
        measure(shape, ways, sites[name], save)
    print(stem.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
