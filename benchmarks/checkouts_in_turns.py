"""Times of the kernels in two checkouts of cppmega, in turns on one GPU: what a change costs.

    python -m benchmarks.checkouts_in_turns --before ROOT [--out benchmarks/results] [--rounds 5]

ROOT is another checkout, such as `git worktree add ROOT COMMIT`; the one of this script is the
other side. Each side is a process that imports its own `cppmega` and `tests`, both on the same GPU.
Every case runs in turns: before, after, after, before, as often as --rounds says. For a large shape
it is the GPU's time of forward and backward with the host ahead of it; for a small one the host's
time, which is what a launch costs. A ratio above the noise (that of the same side's halves) is a
loss. Writes checkouts_in_turns_DEVICE.json and .md.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from benchmarks import REPOSITORY
from benchmarks.harness import results
from benchmarks.harness.gpu import card, elapsed, upstream_of

CALLS = 200
"""Calls of a small shape that one time of the host is of."""

Call = Callable[[], Any]


def trained(function: Callable[..., Any], *given: Any) -> Call:
    """Forward and backward of a function whose result is a tensor or several."""
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in given]
    wanted = [x for x in leaves if x.requires_grad]

    def call() -> None:
        out = function(*leaves)
        every = [out] if isinstance(out, Tensor) else list(out)
        made = [upstream_of(x.shape, x.dtype) for x in every]
        torch.autograd.grad(every, wanted, made)

    return call


def normal(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Standard normal values; a slice of the last dimension has strides as in a layer."""
    return torch.randn(*size, device="cuda", generator=_drawn()).to(dtype)


def _drawn() -> torch.Generator:
    return torch.Generator("cuda").manual_seed(5)


def cases(s: int, b: int) -> Iterator[tuple[str, Call]]:
    """Name and call of each kernel family at NAM56R's widths, for b sequences of s tokens."""
    from cppmega.ops import (
        dsa_attention,
        dsa_indexer,
        linear_cross_entropy,
        m2rnn,
        mamba3,
        mhc,
        ngram_hash,
        packed_conv,
    )
    from cppmega.ops.pointwise import hadamard, rope, split_columns
    from tests.ops.m2rnn import checks as m2rnn_checks
    from tests.ops.mamba3 import checks as mamba3_checks
    from tests.ops.mhc import checks as mhc_checks

    scale, topk = 128**-0.5, min(256, s)
    index = normal(s, b, 32, 64), normal(s, b, 64), normal(s, b, 32) * 0.02
    attended = normal(s, b, 32, 128), normal(s, b, 1, 128)
    for sparse in (False, True):
        loss = dsa_indexer.Loss(softmax_scale=scale, coefficient=0.001, sparse=sparse)

        def indexed(q: Tensor, k: Tensor, weights: Tensor, loss: Any = loss) -> Tensor:
            out = dsa_indexer.indexer_loss(q, k, weights, *attended, topk, loss)
            return out.loss

        yield f"indexer, {'sparse' if sparse else 'dense'} loss", trained(indexed, *index)
    chosen = dsa_indexer.choose_keys(*index, topk)
    attend = lambda q, k: dsa_attention.sparse_attention(q, k, 64, chosen, scale)  # noqa: E731
    yield "sparse attention", trained(attend, *attended)
    yield "Hadamard", trained(lambda x: hadamard.walsh_hadamard(x, 0.1), normal(s, b, 32, 64))
    angles = normal(s, 1, 1, 64, dtype=torch.float32)
    yield "RoPE", trained(lambda x: rope.rotated(x[..., 64:], angles), normal(s, b, 32, 128))
    widths = (8192, 8192, 2048)
    columns = lambda x: split_columns.split_columns(x, widths)  # noqa: E731
    yield "split columns", trained(columns, normal(s, b, sum(widths)))
    shape = m2rnn_checks.Shape(s=s, b=b, heads=51, k=64, v=16)
    yield "M2RNN", trained(m2rnn.m2rnn, *m2rnn_checks.drawn(shape, torch.bfloat16, "cuda"))
    conv = m2rnn_checks.drawn_conv(s, b, 1024, 4, torch.bfloat16, "cuda")
    yield "packed convolution", trained(packed_conv.packed_conv, *conv)
    orders = ngram_hash.hashing((2, 3), 8, [50021 + 2 * i for i in range(16)], 1)
    tokens = torch.randint(0, 65536, (b, s), device="cuda", generator=_drawn())
    rows = ngram_hash.table_rows(tokens, torch.zeros_like(tokens, dtype=torch.bool), orders.cuda())
    table = normal(int(rows.max()) + 1, 16)
    yield "n-gram lookup", trained(lambda x: ngram_hash.lookup(x, rows), table)
    logits = torch.randint(0, 65536, (s, b), device="cuda", generator=_drawn())

    def losses(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy.linear_cross_entropy(hidden, weight, logits).loss

    yield "linear cross-entropy", trained(losses, normal(s, b, 1024), normal(65536, 1024))
    given = mhc_checks.drawn(mhc_checks.Shape(64, b, 4, 4096), torch.bfloat16, device="cuda")
    streams, out = given.streams.repeat(s // 64, 1, 1, 1), given.out.repeat(s // 64, 1, 1)

    def site(streams: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        seen, at = mhc.read(streams, given.parameters, 3)
        return mhc.write(at, out), seen

    yield "mHC site", trained(site, streams, out)
    wide = mamba3_checks.Shape(b, s, 128, 8, 4, 128, 64)
    inputs, parameters = mamba3_checks.drawn(wide, torch.bfloat16, "cuda", dt=-4.0)
    leaves = [*mamba3_checks.leaves(inputs, parameters).values()]

    def mixed() -> None:
        made = mamba3.mixed(inputs, parameters, "softplus", None, 16)
        torch.autograd.grad(made, leaves, upstream_of(made.shape, made.dtype))

    yield "Mamba-3", mixed


def host_time(call: Call) -> float:
    """Milliseconds of the host for one call, the GPU's work being less."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / CALLS * 1e3


def serve() -> None:
    """One side: `SIZE NUMBER` per line in, milliseconds per line out; first, the names."""
    sizes = {"large": (4096, 2), "small": (64, 1)}
    made = {size: list(cases(*shape)) for size, shape in sizes.items()}
    for size, every in made.items():
        for name, call in every:
            call()
            call()
            print(f"{size}: {name}", file=sys.stderr, flush=True)
    torch.cuda.synchronize()
    print(json.dumps([name for name, _ in made["large"]]), flush=True)
    for line in sys.stdin:
        size, number = line.split()
        call = made[size][int(number)][1]
        if size == "small":
            print(host_time(call), flush=True)
        else:
            print(statistics.median(elapsed(call, repeats=6, queued=True)), flush=True)
        torch.cuda.synchronize()


class Side:
    """A process that serves the times of one checkout."""

    def __init__(self, root: Path) -> None:
        """Start it; raises SystemExit if it ends before it is ready."""
        code = (
            f"import sys; sys.path.insert(0, {str(root)!r}); import cppmega, tests.ops; "
            f"assert cppmega.__file__.startswith({str(root)!r}); "
            f"sys.path.insert(0, {str(REPOSITORY)!r}); "
            "from benchmarks import checkouts_in_turns; checkouts_in_turns.serve()"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
        )

    def told(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a side ended: {self.process.wait()}")
        return json.loads(line)

    def time(self, size: str, number: int) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{size} {number}\n")
        self.process.stdin.flush()
        return float(self.told())


def lines(report: dict[str, Any]) -> str:
    stack = results.versions(report["stack"])
    blocks: list[results.Page] = [
        "# Kernels of two checkouts, in turns",
        f"Written by `benchmarks/checkouts_in_turns.py`: {stack}; before: {report['before']}.",
    ]
    columns = ["kernels", *((x, ".3f") for x in ("before, ms", "after, ms", "after / before"))]
    for size, what in (
        ("large", "2 x 4096 tokens: the GPU's time of forward and backward"),
        ("small", "64 tokens: the host's time of forward and backward"),
    ):
        rows = [[name, *_ratio(**sides)] for name, sides in report[size].items()]
        blocks += [f"## {what}", results.table([*columns, ("noise", ".3f")], rows)]
    return results.page(*blocks)


def _ratio(before: list[float], after: list[float]) -> tuple[float, float, float, float]:
    """Both medians, their ratio, and the larger ratio of the halves of one side."""
    first, last, half = statistics.median(before), statistics.median(after), len(before) // 2
    halves = (statistics.median(x[:half]) / statistics.median(x[half:]) for x in (before, after))
    return first, last, last / first, max(abs(ratio - 1) for ratio in halves)


@click.command(help=__doc__)
@click.option("--before", required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--name", default="the other checkout", help="What the report calls it.")
@click.option("--rounds", default=5, help="Times that both sides take two turns each.")
@results.out_option()
def main(before: Path, name: str, rounds: int, out: Path) -> None:
    sides = {"before": Side(before.resolve()), "after": Side(REPOSITORY)}
    names, _ = (side.told() for side in sides.values())
    report: dict[str, Any] = {"stack": results.stack("triton"), "before": name}
    for size in ("large", "small"):
        report[size] = {}
        for number, case in enumerate(names):
            times: dict[str, list[float]] = {"before": [], "after": []}
            for _ in range(rounds):
                for side in ("before", "after", "after", "before"):
                    times[side].append(sides[side].time(size, number))
            report[size][case] = times
            print(size, case, {side: f"{min(x):.3f}" for side, x in times.items()}, flush=True)
    results.write(out, f"checkouts_in_turns_{card()}", report, lines(report))


if __name__ == "__main__":
    main()
