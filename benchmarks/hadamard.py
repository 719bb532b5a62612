"""Compare the Walsh-Hadamard kernel of DSA's indexer with what it replaces, on one GPU.

usage: python -m benchmarks.hadamard [--out benchmarks/results]

First the bits: the kernel must give those of the transform in plain torch, stage by stage. Then the
median time of the forward over the indexer's queries `[s, b, heads, 128]`, all in turns, next to a
product with the matrix in bf16 (which rounds differently) and a plain copy, the lower bound of
anything that reads and writes once. Writes hadamard_h200.json and .md.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.harness import results
from benchmarks.harness.gpu import elapsed, rounds
from cppmega.ops.pointwise import hadamard

WIDTH = 128
SHAPES = {"queries": (32, WIDTH), "queries, 64 heads": (64, WIDTH), "keys": (WIDTH,)}
SEQUENCE = 4096
ROUNDS, CALLS = 20, 10


def measure(shape: tuple[int, ...]) -> dict[str, Any]:
    """Median milliseconds of each implementation; raises SystemExit if the bits differ."""
    x = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    scale = WIDTH**-0.5
    matrix = hadamard.walsh_hadamard(torch.eye(WIDTH, device="cuda"), scale).bfloat16()
    everyone: dict[str, Callable[[], torch.Tensor]] = {
        "torch, stage by stage": lambda: hadamard._stage_by_stage(x, scale),
        "product with the matrix": lambda: x @ matrix,
        "kernel": lambda: hadamard.walsh_hadamard(x, scale),
        "copy": x.clone,
    }
    if not torch.equal(everyone["kernel"](), everyone["torch, stage by stage"]()):
        raise SystemExit(f"other bits at {shape}")
    times: dict[str, list[float]] = {name: [] for name in everyone}
    for _, name in rounds(everyone, ROUNDS + 2):
        # Repeatedly, so that the GPU is timed and not the host's launches.
        times[name] += elapsed(
            lambda call: [call() for _ in range(CALLS)], everyone[name], repeats=1
        )
    return {name: statistics.median(found[2:]) / CALLS for name, found in times.items()}


def page(report: dict[str, Any]) -> str:
    rows = report["milliseconds"]
    ways = [(name, ".3f") for name in next(iter(rows.values()))]
    return results.page(
        "# Walsh-Hadamard transform of the indexer, bf16, forward, milliseconds",
        "Written by `benchmarks/hadamard.py`. The kernel gives the bits of the torch transform.",
        results.bullets({name: x for name, x in report.items() if name != "milliseconds"}),
        results.table(["shape", *ways], ([shape, *row.values()] for shape, row in rows.items())),
    )


@click.command(help=__doc__)
@results.out_option()
def main(out: Path) -> None:
    rows = {
        f"{what}, s={SEQUENCE}, b={batch}": measure((SEQUENCE, batch, *rest))
        for batch in (1, 8)
        for what, rest in SHAPES.items()
    }
    report = {**results.stack("triton"), "milliseconds": rows}
    results.write(out, "hadamard_h200", report, page(report))


if __name__ == "__main__":
    main()
