"""Hyper-connections on one GPU: our ops and sites against other implementations.

usage: python -m benchmarks.mhc [--dev ROOT] [--out benchmarks/results] [--only NAME]...

At the first shape it also measures the others of `mhc_others.py`: Megatron's branch dev, from a
checkout at ROOT, without cuTile, with cuTile where it prefers that to torch, and by cuTile alone;
Transformer Engine and Liger, if they are installed; and torch.compile of the reference; and of dev
and Transformer Engine each op. A rival's own layout is made outside of the time. Results or
gradients of ours that differ from the reference by more than the rounding of bf16 stop the run; a
rival that differs or fails is left out, and the result says why. (Against fp64, `pytest -m gpu
tests/ops/mhc/test_mhc.py` compares ours.) Times are medians of 10 with CUDA events while the GPU
has work queued, so that the host is not in them: of a site forward plus backward, the sum of the
streams' gradients included. The least time is that of what a site has to move (45 streams
`[s, b, C]` if n is 4) at the bandwidth of a copy on this card. mhc_DEVICE.json and .md are
rewritten after every implementation; with --only, they keep the other shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from torch._functorch import config as functorch

from benchmarks.harness import gpu, results
from benchmarks.mhc_others import (
    ITERATIONS,
    OWN,
    Calls,
    Inputs,
    Way,
    Ways,
    cutile,
    others,
    ours,
    plain,
)
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

NAMES = checks.NAMES[:9]
queued = partial(gpu.median, queued=True)
OpTimes = dict[str, list[float]]
"""Name of an op -> milliseconds forward and backward, and what else is known of both."""

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


def traffic(shape: Shape) -> dict[str, list[int]]:
    """Bytes that each op has to read and write in bf16, forward and backward."""
    s, b, n, c = shape
    streams = {
        "weights": (n, 2 * n),
        "aggregate": (n + 1, 2 * n + 1),
        "update": (2 * n + 1, 3 * n + 2),
        "site": (4 * n + 2, 6 * n + 3),
    }
    return {op: [many * s * b * c * 2 for many in both] for op, both in streams.items()}


def large(shape: Shape) -> tuple[Inputs, Tensor]:
    """Inputs of so many tokens, of which some differ: drawing all takes minutes. And a bias."""
    few = checks.drawn(shape._replace(s=64), torch.bfloat16, device="cuda")
    times = shape.s // 64
    streams, out = few.streams.repeat(times, 1, 1, 1), few.out.repeat(times, 1, 1)
    return Inputs(streams, *few.parameters, out), few.bias


def measure(
    shape: Shape,
    ways: Ways,
    times: dict[str, float],
    ops: dict[str, OpTimes],
    left_out: dict[str, str],
    save: Callable[[], None],
) -> None:
    """Put the milliseconds of each way into `times`, and of its ops into `ops`.

    Somebody else's way that differs or raises an error is left out, and `left_out` says why.

    Raises:
        SystemExit: one of ours is another function.
    """
    given, of_out = large(shape)
    upstream = [torch.randn_like(given.streams), torch.randn_like(given.out)]
    exact = in_our_layout(Way(plain), given, upstream)
    for name, make in ways.items():
        try:
            way = make()
            found = in_our_layout(way, given, upstream)
            for what, want, mine in zip(NAMES, exact, found, strict=True):
                if want.numel() > 1:
                    gpu.refuse(name, {what: gpu.distance(mine, want)}, TOLERANCE)
            del found
            leaves, turned = own_inputs(way, given, upstream)
            times[name] = queued(gpu.both_ways, way.call, leaves, turned)
            print(f"{name}: {times[name]:.3f} ms", flush=True)
            save()
            if way.ops is not None:
                for leaf in given:
                    leaf.requires_grad_()
                ops[name] = op_times(way.ops(given))
                save()
        except (Exception, SystemExit) as error:
            if name.startswith("ours"):
                raise
            left_out[name] = f"{type(error).__name__}: {error}"[:300]
            print(f"{name}: {left_out[name]}", flush=True)
            save()
        finally:
            for leaf in given:
                leaf.requires_grad_(False)
    times["ours, with a bias"] = queued(gpu.both_ways, ours, (*given, of_out), upstream)
    save()


def own_inputs(
    way: Way, given: Inputs, upstream: list[Tensor]
) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Leaves and upstream gradients in a way's own layout."""
    leaves = tuple(x.contiguous() for x in way.leaves(given))
    return leaves, [way.turned(upstream[0]).contiguous(), upstream[1]]


def in_our_layout(way: Way, given: Inputs, upstream: list[Tensor]) -> list[Tensor]:
    """Results and gradients."""
    new, seen, *gradients = gpu.both_ways(way.call, *own_inputs(way, given, upstream))
    d_streams, *others, d_out = gradients
    return [way.turned(new), seen, way.turned(d_streams), *way.parameters(others), d_out]


def own_ops(shape: Shape) -> Calls:
    """Ours."""
    given, _ = large(shape)
    streams, out = given.streams, given.out
    kept = [x.detach() for x in mhc.weights(streams, given.parameters, ITERATIONS)]
    for leaf in (*given, *kept):
        leaf.requires_grad_()
    h_pre, h_post, h_res = kept
    logits = torch.randn_like(h_res, requires_grad=True)
    site, of_weights = list(given), partial(mhc.weights, streams, given.parameters, ITERATIONS)
    return {
        "sinkhorn": (lambda: (mhc.sinkhorn(logits, ITERATIONS),), [logits]),
        "weights": (of_weights, site[:6]),
        "aggregate": (lambda: (mhc.aggregate(streams, h_pre),), [streams, h_pre]),
        "update": (
            lambda: (mhc.update(streams, h_res, h_post, out),),
            [streams, h_res, h_post, out],
        ),
        "site": (lambda: ours(*given), site),
    }


def op_times(calls: Calls) -> OpTimes:
    """Milliseconds of each op, forward and backward."""
    found = {}
    for name, (call, needed) in calls.items():
        got = call()
        given_back = (got, needed, [torch.randn_like(x) for x in got])
        backward = partial(torch.autograd.grad, *given_back, retain_graph=True)
        found[name] = [queued(call), queued(backward)]
    return found


def with_shares(times: OpTimes, shape: Shape, speed: float) -> OpTimes:
    """The same, and what share of the bandwidth the least traffic of an op reaches."""
    least = {op: [size / speed for size in sizes] for op, sizes in traffic(shape).items()}
    return {
        op: found + [a / b for a, b in zip(least.get(op, ()), found, strict=False)]
        for op, found in times.items()
    }


def site_table(sites: dict[str, dict[str, float]]) -> Iterator[str]:
    """Milliseconds, and the ratio to ours."""

    def cell(times: dict[str, float], name: str) -> str:
        known = {name, "ours"} <= times.keys()
        return f"{times[name]:.3f} ({times[name] / times['ours']:.2f})" if known else ""

    names = dict.fromkeys(name for times in sites.values() for name in times)
    rows = ([name, *(cell(times, name) for times in sites.values())] for name in names)
    return results.table(["forward + backward", *sites], rows)


def op_table(ops: dict[str, OpTimes]) -> Iterator[str]:
    """Milliseconds forward / backward, and the share of the bandwidth."""

    def row(name: str) -> Iterator[str]:
        yield from (name, *(_both(*found[name]) for found in ops.values()))
        yield _both(*PUBLISHED[name]) if name in PUBLISHED else ""

    return results.table(
        ["op", *ops, "published for Blackwell"], map(row, next(iter(ops.values())))
    )


def others_table(ours: OpTimes, ops: dict[str, OpTimes]) -> Iterator[str]:
    """Milliseconds forward / backward of all implementations, and how many times ours that is."""

    def cell(found: OpTimes, op: str) -> str:
        ratio = sum(found[op][:2]) / sum(ours[op][:2])
        return f"{_both(*found[op][:2])} ({ratio:.2f})"

    every = {"ours": ours, **ops}
    rows = ([op, *(cell(found, op) for found in every.values())] for op in next(iter(ops.values())))
    return results.table(["op", *every], rows)


def _both(forward: float, backward: float, *shares: float) -> str:
    share = " (" + ", ".join(f"{x:.0%}" for x in shares) + ")" if shares else ""
    return f"{forward:.3f} / {backward:.3f}{share}"


def page(report: dict[str, Any]) -> str:
    left_out, of_others = report.get("left out", {}), report.get("others' ops", {})
    tables = ("sites", "ops", "others' ops", "left out")
    return results.page(
        "# Hyper-connections in bf16: a site and its ops",
        "Written by `benchmarks/mhc.py`, after a comparison of results and gradients.",
        results.bullets({k: x for k, x in report.items() if k not in tables}),
        site_table(report["sites"]),
        "Milliseconds, and in parentheses how many times ours that is.",
        results.bullets({f"left out, {name}": f"`{why}`" for name, why in left_out.items()}),
        op_table(report["ops"]),
        "Milliseconds forward / backward, and in parentheses the share of a copy's bandwidth that\n"
        "the least traffic of the op reaches. The last column is upstream's own account of its\n"
        "fused kernels on another GPU, where `weights` is the projection alone.",
        *(
            block
            for case, ops in of_others.items()
            for block in (
                f"## The ops of others: {case}",
                others_table(report["ops"][case], ops),
                "Milliseconds forward / backward, and in parentheses how many times ours the sum "
                "is. Ours keeps\nthe weights of the streams in fp32, dev rounds them to bf16.",
            )
        ),
    )


@click.command(help=__doc__)
@results.folder_option("--dev", "a checkout of Megatron's branch dev")
@results.out_option()
@click.option("--only", multiple=True, help="only shapes whose names begin with this")
def main(dev: Path | None, out: Path, only: tuple[str, ...]) -> None:
    # Backward passes are timed by themselves, again and again on the same graph.
    functorch.donated_buffer = False
    name, speed = f"mhc_{gpu.card()}", bandwidth()
    report: dict[str, Any] = {
        **results.stack("triton", "transformer-engine", "liger-kernel"),
        "cuTile": cutile(),
        "bandwidth of a copy, TB/s": round(speed / 1e9, 2),
    }
    earlier = results.read(out, name) if only else {}
    sites, ops = earlier.get("sites", {}), earlier.get("ops", {})
    of_others: dict[str, dict[str, OpTimes]] = earlier.get("others' ops", {})
    left_out: dict[str, str] = {}

    def save() -> None:
        for what, of in (("sites", sites), ("ops", ops), ("others' ops", of_others)):
            report[what] = {case: of[case] for case in CASES if of.get(case)}
        report["left out"] = left_out
        results.write(out, name, report, page(report))

    for number, (case, shape) in enumerate(CASES.items()):
        if only and not case.startswith(only):
            continue
        print(case, flush=True)
        sites[case] = {"least": sum(traffic(shape)["site"]) / speed}
        ops[case] = with_shares(op_times(own_ops(shape)), shape, speed)
        of_others[case] = {}
        ways = OWN | (others(shape, dev) if number == 0 else {})
        measure(shape, ways, sites[case], of_others[case], left_out, save)


if __name__ == "__main__":
    main()
