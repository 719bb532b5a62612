"""Hyper-connections on one GPU: our ops and sites against other implementations.

usage: python -m benchmarks.mhc [--dev ROOT] [--out benchmarks/results] [--only NAME]...

At the first shape it also measures Megatron's branch dev, from a checkout at ROOT, with the kernels
that it selects on this GPU; Transformer Engine and Liger, if they are installed; and torch.compile
of the reference. A rival's own layout is made outside of the time. Results or gradients that differ
from the reference by more than the rounding of bf16 stop the run. (Against fp64, `pytest -m gpu
tests/ops/mhc/test_mhc.py` compares ours.) Times are medians of 10 with CUDA events while the GPU
has work queued, so that the host is not in them: of a site forward plus backward, the sum of the
streams' gradients included. The least time is that of what a site has to move (45 streams
`[s, b, C]` if n is 4) at the bandwidth of a copy on this card. mhc_DEVICE.json and .md are
rewritten after every implementation; with --only, they keep the other shapes.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import click
import torch
from torch import Tensor

from benchmarks.harness import gpu, results
from cppmega.ops import mhc
from cppmega.ops.mhc.naive import Parameters
from tests.ops.mhc import checks
from tests.ops.mhc.checks import Given, Shape

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

PUBLISHED = {
    "sinkhorn": (0.065, 0.133),
    "aggregate": (0.349, 0.661),
    "update": (0.684, 2.549),
    "weights": (0.426, 1.541),
}
"""Forward and backward of upstream's fused kernels by its own account, on Blackwell; its `weights`
is the projection alone."""
ITERATIONS = 20


class Inputs(NamedTuple):
    """What a site is given: no bias of the sub-layer's output, which most models do not have."""

    streams: Tensor
    phi: Tensor
    alpha_pre: Tensor
    alpha_post: Tensor
    alpha_res: Tensor
    bias: Tensor
    out: Tensor

    @property
    def parameters(self) -> Parameters:
        return Parameters(*self[1:6])


class Way(NamedTuple):
    """A site."""

    call: Callable[..., tuple[Tensor, Tensor]]
    """The streams after it and its aggregate, from its own leaves."""
    leaves: Callable[[Inputs], tuple[Tensor, ...]] = tuple
    """Its own inputs from ours."""
    turned: Callable[[Tensor], Tensor] = lambda x: x
    """Streams, or their gradient, in our layout."""
    parameters: Callable[[list[Tensor]], list[Tensor]] = lambda found: found
    """Gradients of our five parameters from those of its own."""


def ours_by(call: checks.Call) -> Callable[..., tuple[Tensor, Tensor]]:
    """A site of the tests with these leaves, and with the output's bias if it is one of them."""

    def site(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        given, bias = Inputs(*leaves[:7]), leaves[7] if len(leaves) > 7 else None
        return call(Given(given.streams, given.parameters, given.out, bias), ITERATIONS)

    return site


ours, plain = ours_by(checks.fused_site), ours_by(checks.plain_site)


def dev(root: Path, shape: Shape) -> Way:
    """The module of Megatron's branch dev with the kernels that it chooses for this GPU."""
    sys.path.insert(0, str(root))
    module = importlib.import_module("megatron.core.transformer.hyper_connection")
    config = SimpleNamespace(
        **{"num_residual_streams": shape.n, "hidden_size": shape.c, "sequence_parallel": False},
        **{"mhc_sinkhorn_iterations": ITERATIONS, "mhc_init_gating_factor": 0.01},
        use_fused_mhc=True,
    )
    init = lambda self, config: torch.nn.Module.__init__(self)  # noqa: E731
    with mock.patch.object(module.MegatronModule, "__init__", init):
        layer = module.HyperConnectionModule(config, 1).cuda()
    names = ("mapping_proj.weight", "alpha_pre", "alpha_post", "alpha_res", "bias")

    def site(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        given = Inputs(*leaves)
        values = dict(zip(names, given.parameters, strict=True))
        streams = given.streams.flatten(-2)
        seen, h_res, h_post, kept = torch.func.functional_call(layer, values, (streams,))
        new = layer.fused_h_res_h_post_bda(h_res, kept, h_post, (given.out, None), 0.0, True, True)
        return new.view_as(given.streams), seen

    return Way(site)


def transformer_engine(shape: Shape, *, one_gradient: bool) -> Way:
    """Transformer Engine's kernels; with `one_gradient` they add up that of the streams in fp32."""
    ops = importlib.import_module("transformer_engine.pytorch.triton.mhc")
    _, _, n, c = shape

    def leaves(given: Inputs) -> tuple[Tensor, ...]:
        phi = given.phi.view(-1, n, c).transpose(1, 2).reshape(-1, n * c)
        alpha = torch.cat((given.alpha_pre, given.alpha_post, given.alpha_res))
        return turned(given.streams).contiguous(), phi, alpha, given.bias[None], given.out

    def turned(x: Tensor) -> Tensor:
        return x.transpose(-1, -2)

    def site(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        streams, phi, alpha, bias, out = leaves
        total = torch.empty_like(streams, dtype=torch.float32) if one_gradient else None
        seen, h_post, h_res = ops.mhc_generate_mix_and_aggregate(
            streams, phi, alpha, bias, fused_grad_x_acc_buffer=total
        )
        new = ops.mhc_fused_expand_combine(
            out, None, h_post, streams, h_res, n, fused_grad_x_acc_buffer=total
        )
        return new, seen

    def parameters(found: list[Tensor]) -> list[Tensor]:
        phi, alpha, bias = found
        own = phi.view(-1, c, n).transpose(1, 2).reshape(-1, n * c)
        return [own, *alpha.split(1), bias[0]]

    return Way(site, leaves, turned, parameters)


def liger() -> Way:
    ops = importlib.import_module("liger_kernel.transformers.functional")

    def leaves(given: Inputs) -> tuple[Tensor, ...]:
        phi = given.phi.t().to(given.streams.dtype).contiguous()
        alphas = given.alpha_pre[0], given.alpha_post[0], given.alpha_res[0]
        return given.streams, phi, *alphas, given.bias, given.out

    def site(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        streams, phi, pre, post, res, bias, out = leaves
        h_pre, h_post, h_res = ops.liger_mhc_coeffs(
            streams, phi, bias, pre, post, res, tmax=ITERATIONS, pre_eps=1e-6
        )
        new = ops.liger_mhc_post_res(streams, out, h_post, h_res.transpose(-1, -2))
        return new, ops.liger_mhc_pre(streams, h_pre)

    def parameters(found: list[Tensor]) -> list[Tensor]:
        phi, pre, post, res, bias = found
        return [phi.t(), pre[None], post[None], res[None], bias]

    return Way(site, leaves, parameters=parameters)


Ways = dict[str, Callable[[], Way]]
OWN: Ways = {
    "ours": partial(Way, ours),
    "ours, single ops": partial(Way, ours_by(checks.fused_ops)),
    "reference": partial(Way, plain),
}


def others(shape: Shape, root: Path | None) -> Ways:
    """All other implementations that are available; `root` is a checkout of the branch dev."""
    ways: Ways = {"dev": partial(dev, root, shape)} if root is not None else {}
    if importlib.util.find_spec("transformer_engine"):
        for name, one in {"": False, ", one gradient buffer": True}.items():
            way = partial(transformer_engine, shape, one_gradient=one)
            ways[f"Transformer Engine{name}"] = way
    if importlib.util.find_spec("liger_kernel"):
        ways["Liger"] = liger
    return ways | {"torch.compile of the reference": lambda: Way(torch.compile(plain))}


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
            if want.numel() > 1:
                gpu.refuse(name, {what: gpu.distance(mine, want)}, TOLERANCE)
        del found
        leaves, turned = own_inputs(way, given, upstream)
        times[name] = queued(gpu.both_ways, way.call, leaves, turned)
        print(f"{name}: {times[name]:.3f} ms", flush=True)
        save()
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


def measure_ops(shape: Shape, speed: float) -> dict[str, list[float]]:
    """Of each op of ours forward and backward: milliseconds, and its share of the bandwidth."""
    given, _ = large(shape)
    streams, out = given.streams, given.out
    kept = [x.detach() for x in mhc.weights(streams, given.parameters, ITERATIONS)]
    for leaf in (*given, *kept):
        leaf.requires_grad_()
    h_pre, h_post, h_res = kept
    logits = torch.randn_like(h_res, requires_grad=True)
    site, of_weights = list(given), partial(mhc.weights, streams, given.parameters, ITERATIONS)
    calls: dict[str, tuple[Callable[[], tuple[Tensor, ...]], list[Tensor]]] = {
        "sinkhorn": (lambda: (mhc.sinkhorn(logits, ITERATIONS),), [logits]),
        "weights": (of_weights, site[:6]),
        "aggregate": (lambda: (mhc.aggregate(streams, h_pre),), [streams, h_pre]),
        "update": (
            lambda: (mhc.update(streams, h_res, h_post, out),),
            [streams, h_res, h_post, out],
        ),
        "site": (lambda: ours(*given), site),
    }
    found = {}
    for name, (call, needed) in calls.items():
        got = call()
        given_back = (got, needed, [torch.randn_like(x) for x in got])
        backward = partial(torch.autograd.grad, *given_back, retain_graph=True)
        times = [queued(call), queued(backward)]
        least = [size / speed for size in traffic(shape).get(name, ())]
        found[name] = times + [a / b for a, b in zip(least, times, strict=False)]
    return found


def site_table(sites: dict[str, dict[str, float]]) -> Iterator[str]:
    """Milliseconds, and the ratio to ours."""

    def cell(times: dict[str, float], name: str) -> str:
        known = {name, "ours"} <= times.keys()
        return f"{times[name]:.3f} ({times[name] / times['ours']:.2f})" if known else ""

    names = dict.fromkeys(name for times in sites.values() for name in times)
    rows = ([name, *(cell(times, name) for times in sites.values())] for name in names)
    return results.table(["forward + backward", *sites], rows)


def op_table(ops: dict[str, dict[str, list[float]]]) -> Iterator[str]:
    """Milliseconds forward / backward, and the share of the bandwidth."""

    def cell(forward: float, backward: float, *shares: float) -> str:
        share = " (" + ", ".join(f"{x:.0%}" for x in shares) + ")" if shares else ""
        return f"{forward:.3f} / {backward:.3f}{share}"

    def row(name: str) -> Iterator[str]:
        yield from (name, *(cell(*found[name]) for found in ops.values()))
        yield " / ".join(f"{x:.3f}" for x in PUBLISHED.get(name, ()))

    return results.table(
        ["op", *ops, "published for Blackwell"], map(row, next(iter(ops.values())))
    )


def page(report: dict[str, Any]) -> str:
    return results.page(
        "# Hyper-connections in bf16: a site and its ops",
        "Written by `benchmarks/mhc.py`, after a comparison of results and gradients.",
        results.bullets({k: x for k, x in report.items() if k not in ("sites", "ops")}),
        site_table(report["sites"]),
        "Milliseconds, and in parentheses how many times ours that is.",
        op_table(report["ops"]),
        "Milliseconds forward / backward, and in parentheses the share of a copy's bandwidth that\n"
        "the least traffic of the op reaches. The last column is upstream's own account of its\n"
        "fused kernels on another GPU, where `weights` is the projection alone.",
    )


@click.command(help=__doc__)
@results.folder_option("--dev", "a checkout of Megatron's branch dev")
@results.out_option()
@click.option("--only", multiple=True, help="only shapes whose names begin with this")
def main(dev: Path | None, out: Path, only: tuple[str, ...]) -> None:
    name, speed = f"mhc_{gpu.card()}", bandwidth()
    report: dict[str, Any] = {
        **results.stack("triton", "transformer-engine", "liger-kernel"),
        "bandwidth of a copy, TB/s": round(speed / 1e9, 2),
    }
    earlier = results.read(out, name) if only else {}
    sites, ops = earlier.get("sites", {}), earlier.get("ops", {})

    def save() -> None:
        for what, of in (("sites", sites), ("ops", ops)):
            report[what] = {case: of[case] for case in CASES if case in of}
        results.write(out, name, report, page(report))

    for number, (case, shape) in enumerate(CASES.items()):
        if only and not case.startswith(only):
            continue
        print(case, flush=True)
        sites[case] = {"least": sum(traffic(shape)["site"]) / speed}
        ops[case] = measure_ops(shape, speed)
        ways = OWN | (others(shape, dev) if number == 0 else {})
        measure(shape, ways, sites[case], save)


if __name__ == "__main__":
    main()
