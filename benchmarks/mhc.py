"""Hyper-connections on one GPU: our ops and sites against dev's module and torch.compile.

usage: python benchmarks/mhc.py --dev ROOT [--out benchmarks/results] [--only NAME]

ROOT holds a checkout of Megatron's branch dev, whose module is measured with the kernels that it
chooses on this GPU. All ways run in this process on the same inputs. Before any time, results and
gradients of ours are compared with fp64 by the checks of the tests, and a way that differs from
ours by more than the rounding of bf16 explains stops the run. Times are medians of 10 with CUDA
events, of forward plus backward, the sum of the streams' gradients included. The least time is that
of 45 streams `[s, b, C]` (n = 4) at the bandwidth that a copy reaches on this card. Writes
mhc_DEVICE.json and .md.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from datetime import date
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from linear_cross_entropy import median
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cppmega.ops import mhc
from tests.ops import mhc_checks as checks
from tests.ops.mhc_checks import Given, Shape

ITERATIONS = 20
CASES = {
    "s 8192, b 4, n 4, C 7168": Shape(8192, 4, 4, 7168),
    "s 4096, b 8, n 4, C 4096": Shape(4096, 8, 4, 4096),
    "s 4096, b 8, n 2, C 4096": Shape(4096, 8, 2, 4096),
    "s 4096, b 4, n 8, C 4096": Shape(4096, 4, 8, 4096),
}
TOLERANCE = 2e-2
"""Relative L2 distance of two ways in bf16; dev rounds the weights to bf16 as well."""

Way = Callable[[Given, int], tuple[Tensor, Tensor]]


def bandwidth() -> float:
    """Bytes per millisecond that a copy reads and writes."""
    source = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.numel() / median(target.copy_, source)


def least(shape: Shape) -> int:
    """Bytes that a site with its backward has to move."""
    s, b, n, c = shape
    forward = n + (n + 1) + (2 * n + 1)
    backward = (3 * n + 2) + (3 * n + 1)
    return (forward + backward) * s * b * c * 2


def large(shape: Shape) -> Given:
    """Inputs of so many tokens, of which only some differ: drawing all of them takes minutes."""
    drawn = 64
    few = checks.drawn(shape._replace(s=drawn), torch.bfloat16, device="cuda")
    times = shape.s // drawn
    streams, out = few.streams.repeat(times, 1, 1, 1), few.out.repeat(times, 1, 1)
    return few._replace(streams=streams, out=out)


def dev_site(root: Path, shape: Shape) -> Way:
    """Dev's module, as it is configured for this GPU, with the parameters that it is given."""
    sys.path.insert(0, str(root))
    module = importlib.import_module("megatron.core.transformer.hyper_connection")
    config = SimpleNamespace(
        num_residual_streams=shape.n,
        hidden_size=shape.c,
        mhc_sinkhorn_iterations=ITERATIONS,
        mhc_init_gating_factor=0.01,
        use_fused_mhc=True,
        sequence_parallel=False,
    )
    plain = lambda self, config: torch.nn.Module.__init__(self)  # noqa: E731
    with mock.patch.object(module.MegatronModule, "__init__", plain):
        layer = module.HyperConnectionModule(config, 1).cuda()

    def site(given: Given, iterations: int) -> tuple[Tensor, Tensor]:
        names = ("mapping_proj.weight", "alpha_pre", "alpha_post", "alpha_res", "bias")
        values = dict(zip(names, given.parameters, strict=True))
        streams = given.streams.flatten(-2)
        seen, h_res, h_post, kept = torch.func.functional_call(layer, values, (streams,))
        new = layer.fused_h_res_h_post_bda(
            h_res, kept, h_post, (given.out, given.bias), 0.0, True, True
        )
        return new.view_as(given.streams), seen

    return site


def ways_of(shape: Shape, dev: Path | None) -> dict[str, Way]:
    """What does a site, ours first."""
    ways: dict[str, Way] = {
        "ours": checks.fused_site,
        "ours, single ops": checks.fused_ops,
        "torch.compile": torch.compile(checks.plain_site),
    }
    if dev is not None:
        ways["dev"] = dev_site(dev, shape)
    return ways


def measure(shape: Shape, dev: Path | None) -> dict[str, float]:
    """Milliseconds of each way; SystemExit if one is another function."""
    given = large(shape)
    upstream = [torch.randn_like(given.streams), torch.randn_like(given.out)]
    times: dict[str, float] = {}
    ours: list[Tensor] = []
    for name, way in ways_of(shape, dev).items():
        found = checks.both_ways(way, given, upstream, ITERATIONS)
        ours = ours or found
        for what, mine, theirs in zip(checks.NAMES, ours, found, strict=True):
            distance = float((mine.float() - theirs.float()).norm() / mine.float().norm())
            if distance > TOLERANCE and mine.numel() > 1:
                raise SystemExit(f"{name} differs in {what}: {distance:.2e}")
        del found
        times[name] = median(checks.both_ways, way, given, upstream, ITERATIONS)
    return times


def measure_ops(shape: Shape) -> dict[str, float]:
    """Milliseconds of each op of ours, forward plus backward."""
    streams, parameters, out, _ = large(shape)
    kept = [x.detach() for x in mhc.weights(streams, parameters, ITERATIONS)]
    for leaf in (streams, *parameters, out, *kept):
        leaf.requires_grad_()
    h_pre, h_post, h_res = kept
    logits = torch.randn_like(h_res, requires_grad=True)
    calls: dict[str, Callable[[], Tensor]] = {
        "sinkhorn": lambda: mhc.sinkhorn(logits, ITERATIONS),
        "aggregate": lambda: mhc.aggregate(streams, h_pre),
        "update": lambda: mhc.update(streams, h_res, h_post, out),
        "weights": lambda: torch.cat(
            [x.flatten() for x in mhc.weights(streams, parameters, ITERATIONS)]
        ),
    }
    found = {}
    for name, call in calls.items():
        upstream = torch.randn_like(call())
        found[f"{name}, forward"] = median(call)
        found[f"{name}, both"] = median(lambda c=call, u=upstream: c().backward(u))
    return found


def table(title: str, rows: dict[str, dict[str, float]]) -> list[str]:
    """Rows of milliseconds as markdown."""
    names = list(next(iter(rows.values())))
    return [
        "",
        f"| {title} | " + " | ".join(names) + " |",
        "|---" * (len(names) + 1) + "|",
        *(
            f"| {what} | " + " | ".join(f"{times[n]:.3f}" for n in names) + " |"
            for what, times in rows.items()
        ),
    ]


def main() -> None:
    """Check, measure and write."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--dev", type=Path, help="a checkout of Megatron's branch dev")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--only", default="", help="cases whose name begins so")
    options = parser.parse_args()
    for n in (2, 4, 8):
        checks.check(Shape(333, 2, n, 1000), torch.bfloat16, iterations=ITERATIONS, device="cuda")
    speed = bandwidth()
    sites, ops = {}, {}
    for name, shape in CASES.items():
        if name.startswith(options.only):
            sites[name] = measure(shape, options.dev) | {"least": least(shape) / speed}
            ops[name] = measure_ops(shape)
    device = torch.cuda.get_device_name()
    report = {
        "date": date.today().isoformat(),
        "GPU": device,
        "torch": torch.__version__,
        "triton": metadata.version("triton"),
        "bandwidth of a copy, TB/s": speed / 1e9,
    }
    lines = [
        "# Hyper-connections, bf16, one site, forward plus backward, milliseconds",
        "",
        "Written by `benchmarks/mhc.py`, after a comparison of results and gradients.",
        "",
        *(f"- {name}: {value}" for name, value in report.items()),
        *table("site", sites),
        *table("op", ops),
        "",
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    stem = "mhc_" + device.split()[-1].lower()
    whole = json.dumps(report | {"sites": sites, "ops": ops}, indent=1)
    (options.out / f"{stem}.json").write_text(whole + "\n")
    (options.out / f"{stem}.md").write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
