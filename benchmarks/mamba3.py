"""Mamba-3 on one GPU: the core of our mixer against mamba-ssm's module, its main branch, and SISO.

usage: python -m benchmarks.mamba3 [--main ROOT] [--out benchmarks/results] [--only NAME] [--alone]

Needs mamba-ssm 2.3.2.post1 with cppmega's pages, tilelang and nvcc; with --alone, which measures
only our mixer, none of them. ROOT is a checkout of mamba-ssm's main branch, whose kernels
are measured in the same process. The core is everything between the two projections of a layer;
mamba-ssm's is its kernels, with what surrounds them in plain torch, as in its module. A pack is
compared with 8 sequences of as many tokens. Before anything is timed, our results and gradients are
compared with plain torch in fp32 on short sequences. Times are medians of 10 with CUDA events, of
forward plus backward; bytes are those of the distinct tensors that the core saves for its backward;
what is outside the scan is all kernels but those that multiply matrices. On Hopper, the
kernels for every GPU are measured too. The first launch is that of forward and backward, with its
compilation, if Triton's cache is empty. Writes mamba3_DEVICE.json and .md, or
mamba3_alone_DEVICE, with the time of every kernel.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.harness import results
from benchmarks.harness.gpu import by_kernel, card, distances, median, refuse, upstream_of
from cppmega.ops import mamba3
from cppmega.ops.mamba3 import external as kernels
from cppmega.ops.mamba3 import naive as reference
from cppmega.ops.mamba3 import operands, scan
from tests.ops.mamba3.checks import Shape, drawn, leaves

WHOLE = Shape(8, 4096, 128, 8, 4, 128, 64)
CASES: dict[str, tuple[Shape, int]] = {
    "MIMO, 8 x 4096": (WHOLE, 1),
    "MIMO, 2 x 4096": (WHOLE._replace(batch=2), 1),
    "MIMO of rank 2, 8 x 4096": (WHOLE._replace(rank=2), 1),
    "MIMO, 16 documents of 2048": (WHOLE._replace(batch=1, length=32768), 16),
    "SISO, 8 x 4096": (WHOLE._replace(rank=1), 1),
}
RIVALS = ("MIMO, 8 x 4096", "SISO, 8 x 4096")
"""Cases in which mamba-ssm is measured too; its MIMO kernels compile for minutes for each."""
SCANS = ("mamba_mimo", "mamba3_siso", "forward_", "states_", "values_", "rows_")
"""How the names of the kernels that multiply matrices begin."""
CHUNK = {4: 16, 2: 32, 1: 64}
TOLERANCE = 2e-2
"""Largest relative L2 distance of results in bf16 from plain torch in fp32."""

Way = Callable[[mamba3.Inputs, mamba3.Parameters, Tensor | None, int], Tensor]


def ours(
    inputs: mamba3.Inputs, parameters: mamba3.Parameters, bounds: Tensor | None, chunk: int
) -> Tensor:
    """The core as a mixer calls it."""
    return mamba3.mixed(inputs, parameters, "softplus", bounds, chunk)


def eager(
    inputs: mamba3.Inputs, parameters: mamba3.Parameters, bounds: Tensor | None, chunk: int
) -> Tensor:
    """mamba-ssm's kernels, with everything around them in plain torch, as in its module."""
    made = operands.plain(inputs, parameters, "softplus")
    scan = kernels._siso if parameters.rank_x is None else kernels._mimo
    return scan(made, inputs, parameters, bounds, chunk)


def recomputed(*given: Any) -> Tensor:
    found: Tensor = checkpoint(ours, *given, use_reentrant=False)
    return found


@contextmanager
def imported_from(root: Path) -> Iterator[None]:
    """Import mamba_ssm from another folder, and restore the imported modules afterwards."""

    def own() -> dict[str, Any]:
        return {name: each for name, each in sys.modules.items() if name.startswith("mamba_ssm")}

    before = own()
    for name in before:
        del sys.modules[name]
    sys.path.insert(0, str(root))
    try:
        kernels.of_mamba_ssm(kernels.MIMO)
        yield
    finally:
        sys.path.remove(str(root))
        for name in own():
            del sys.modules[name]
        sys.modules.update(before)


def both_ways(way: Way, *given: Any) -> list[Tensor]:
    """The output and all gradients, for a non-uniform upstream gradient."""
    out, wanted = way(*given), [*leaves(*given[:2]).values()]
    return [out, *torch.autograd.grad(out, wanted, upstream_of(out.shape, out.dtype))]


def kept(way: Way, *given: Any) -> int:
    """Bytes of the distinct storages that are saved for the backward."""
    found: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = way(*given)
    del out
    return sum(found.values())


def given_for(shape: Shape, documents: int) -> tuple[Any, ...]:
    inputs, parameters = drawn(shape, torch.bfloat16, "cuda", dt=-4.0)
    bounds = None
    if documents > 1:
        bounds = torch.arange(documents + 1, dtype=torch.int32, device="cuda")
        bounds *= shape.length // documents
    return inputs, parameters, bounds, CHUNK[shape.rank]


def check(shape: Shape, documents: int) -> None:
    """Compare ours with plain torch; SystemExit if they differ."""
    inputs, parameters, bounds, chunk = given_for(
        shape._replace(length=128, batch=1, heads=16), min(documents, 4)
    )

    def plain(inputs: Any, parameters: Any, bounds: Any, chunk: int) -> Tensor:
        cut = None if bounds is None else bounds.tolist()
        return reference.mixed(inputs, parameters, "softplus", cut, chunk)

    names = ["out", *leaves(inputs, parameters)]
    wanted = both_ways(plain, inputs, parameters, bounds, chunk)
    found = both_ways(ours, inputs, parameters, bounds, chunk)
    refuse(str(shape), distances(names, found, wanted), TOLERANCE)


def measure(
    shape: Shape, documents: int, main: Path | None, rivals: bool
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Milliseconds and saved KB per token of every way, and milliseconds by kernel."""
    given = given_for(shape, documents)
    ways: dict[str, Way] = {"ours": ours, **({"mamba-ssm": eager} if rivals else {})}
    begun = time.monotonic()
    both_ways(ours, *given)
    torch.cuda.synchronize()
    first = time.monotonic() - begun
    row = {name: median(both_ways, way, *given) for name, way in ways.items()}
    with mock.patch.object(scan, "on_hopper", return_value=False):
        row["ours in Triton"] = median(both_ways, ours, *given)
        row["ours in Triton, forward"] = median(ours, *given)
    if main is not None and rivals:
        with imported_from(main):
            row["main"] = median(both_ways, eager, *given)
    if documents > 1:
        row["unpacked"] = median(both_ways, ours, *given_for(WHOLE, 1))
    row["recomputed"] = median(both_ways, recomputed, *given)
    row |= {f"{name}, forward": median(way, *given) for name, way in ways.items()}
    tokens = shape.batch * shape.length
    profiles = {name: by_kernel(both_ways, way, *given) for name, way in ways.items()}
    for name, way in ways.items():
        row[f"{name}, KB per token"] = kept(way, *given) / tokens / 1e3
        row[f"{name}, outside the scan"] = sum(
            time for kernel, time in profiles[name].items() if not kernel.startswith(SCANS)
        )
    row["first launch, s"] = first
    return row, profiles


def table(report: dict[str, Any]) -> str:
    rows: dict[str, dict[str, float]] = report["rows"]
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    blocks: list[results.Page] = [
        "# Mamba-3's core, bf16, forward plus backward, milliseconds",
        "Written by `benchmarks/mamba3.py`, after a comparison of results and gradients. Each row "
        "comes from one process.",
        results.bullets(report["stack"]),
        results.table(
            ["case", *((column, ".2f") for column in columns)],
            ([name, *(row.get(column, "") for column in columns)] for name, row in rows.items()),
        ),
    ]
    for name, found in report["kernels"].items():
        for way, times in found.items():
            blocks += results.by_kernel(f"{name}, {way}", times)
    return results.page(*blocks)


@click.command(help=__doc__)
@results.folder_option("--main", "a checkout of mamba-ssm's main branch")
@results.out_option()
@click.option("--only", default="", help="only cases whose names begin with this")
@click.option("--alone", is_flag=True, help="measure only our kernels")
def command(main: Path | None, out: Path, only: str, alone: bool) -> None:
    stack = results.stack("triton", "tilelang", "mamba-ssm")
    report: dict[str, Any] = {"stack": stack, "rows": {}, "kernels": {}}
    for name, (shape, documents) in CASES.items():
        if name.startswith(only):
            rivals = name in RIVALS and not alone
            if rivals and shape.rank == 1:
                both_ways(eager, *given_for(shape, documents))  # its kernels are tuned only once
            check(shape, documents)
            report["rows"][name], report["kernels"][name] = measure(shape, documents, main, rivals)
            which = "mamba3_alone" if alone else "mamba3"
            results.write(out, f"{which}_{card()}", report, table(report))


if __name__ == "__main__":
    command()
