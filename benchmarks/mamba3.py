"""Mamba-3 on one GPU: the core of our mixer against mamba-ssm's module, its main branch, and SISO.

usage: python benchmarks/mamba3.py [--main ROOT] [--out benchmarks/results] [--only NAME]
                                   [--scan-alone]

Needs mamba-ssm 2.3.2.post1 with cppmega's pages, tilelang and nvcc; with --scan-alone, which
measures only our own scan, none of them. ROOT is a checkout of mamba-ssm's main branch, whose
kernels are measured in the same process. The core is everything between the two projections of a
layer: norms, dt, A, angles, scan, gate and the sum over ranks. Its glue is the part before the
scan, with our kernels or in plain torch. Before anything is timed, our results and gradients are
compared with plain torch in fp32 on short sequences. Times are medians of 10 with CUDA events, of
forward plus backward; bytes are those of the distinct tensors that the core saves for its backward.
Writes mamba3_DEVICE.json and .md, or mamba3_scan_DEVICE.json and .md, with the time of every
kernel.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from on_gpu import by_kernel, median, stack
from torch import Tensor
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cppmega.ops import mamba3
from cppmega.ops import mamba3_kernels as kernels
from cppmega.ops import mamba3_operands as operands
from cppmega.ops import mamba3_reference as reference
from cppmega.ops import mamba3_scan_autograd as scan
from tests.ops.mamba3_checks import Shape, drawn, leaves

WHOLE = Shape(8, 4096, 128, 8, 4, 128, 64)
CASES: dict[str, tuple[Shape, int]] = {
    "MIMO, 8 x 4096": (WHOLE, 1),
    "MIMO, 2 x 4096": (WHOLE._replace(batch=2), 1),
    "MIMO, 16 documents of 2048": (WHOLE._replace(batch=1, length=32768), 16),
    "SISO, 8 x 4096": (WHOLE._replace(rank=1), 1),
}
CHUNK = {4: 16, 1: 64}
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
    """The same kernels, with everything around them in plain torch, as in mamba-ssm's module."""
    made = operands.plain(inputs, parameters, "softplus")
    scan = kernels._siso if parameters.rank_x is None else kernels._mimo
    return scan(made, inputs, parameters, bounds, chunk)


def scanned(
    inputs: mamba3.Inputs, parameters: mamba3.Parameters, bounds: Tensor | None, chunk: int
) -> Tensor:
    """The core with our own scan, which no mixer uses yet."""
    return scan.mixed(inputs, parameters, "softplus", bounds)


def ways_of(shape: Shape, alone: bool) -> dict[str, Way]:
    """Ours, and our own scan for MIMO."""
    own: dict[str, Way] = {"own scan": scanned} if shape.rank > 1 else {}
    return own if alone else {"ours": ours, **own}


def glue(
    make: Callable[..., operands.Operands], inputs: mamba3.Inputs, parameters: mamba3.Parameters
) -> list[Tensor]:
    """The operands of the scan, and the gradients of the tensors from which they are computed."""
    made = make(inputs, parameters, "softplus")
    read, upstream = operands.sources(inputs, parameters), [torch.ones_like(each) for each in made]
    return [*made, *torch.autograd.grad(made, read, upstream)]


def recomputed(*given: Any) -> Tensor:
    """The core under activation recomputation."""
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
    out = way(*given)
    return [
        out,
        *torch.autograd.grad(
            out, [*leaves(*given[:2]).values()], upstream_of(out.shape, out.dtype)
        ),
    ]


@cache
def upstream_of(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The gradient of the output, made once so that no timed call makes it."""
    values = torch.linspace(-1, 1, shape.numel(), device="cuda")
    return values.view(shape).to(dtype)


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
    """Inputs, parameters, boundaries and the chunk."""
    inputs, parameters = drawn(shape, torch.bfloat16, "cuda", dt=-4.0)
    bounds = None
    if documents > 1:
        bounds = torch.arange(documents + 1, dtype=torch.int32, device="cuda")
        bounds *= shape.length // documents
    return inputs, parameters, bounds, CHUNK[shape.rank]


def check(shape: Shape, documents: int, alone: bool) -> None:
    """Compare ours, and our own scan, with plain torch; SystemExit if they differ."""
    inputs, parameters, bounds, chunk = given_for(
        shape._replace(length=128, batch=1, heads=16), min(documents, 4)
    )

    def plain(inputs: Any, parameters: Any, bounds: Any, chunk: int) -> Tensor:
        cut = None if bounds is None else bounds.tolist()
        return reference.mixed(inputs, parameters, "softplus", cut, chunk)

    names = ["out", *leaves(inputs, parameters)]
    wanted = both_ways(plain, inputs, parameters, bounds, chunk)
    for of, way in ways_of(shape, alone).items():
        found = both_ways(way, inputs, parameters, bounds, chunk)
        for name, mine, exact in zip(names, found, wanted, strict=True):
            distance = float((mine.float() - exact.float()).norm() / exact.float().norm())
            if not distance < TOLERANCE:
                raise SystemExit(f"{shape}, {of}: {name} differs by {distance:.2e}")


def measure(
    shape: Shape, documents: int, main: Path | None, alone: bool
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Milliseconds and saved KB per token of every way, and milliseconds by kernel of ours."""
    given = given_for(shape, documents)
    mine = ways_of(shape, alone)
    ways = mine if alone else mine | {"eager": eager, "recomputed": recomputed}
    row = {name: median(both_ways, way, *given) for name, way in ways.items()}
    row |= {f"{name}, forward": median(way, *given) for name, way in mine.items()}
    if not alone:
        for name, make in (("ours", operands.differentiable), ("eager", operands.plain)):
            row[f"glue, {name}"] = median(glue, make, *given[:2])
    if main is not None:
        with imported_from(main):
            row["main, eager"] = median(both_ways, eager, *given)
    tokens = shape.batch * shape.length
    for name, way in ways.items():
        if name != "recomputed":
            row[f"{name}, KB kept per token"] = kept(way, *given) / tokens / 1e3
    return row, {name: by_kernel(both_ways, way, *given) for name, way in mine.items()}


def kernel_table(name: str, found: dict[str, float]) -> list[str]:
    """The kernels that take at least a hundredth of the time."""
    whole = sum(found.values())
    return [
        "",
        f"## {name}, by kernel: {whole:.2f} ms",
        "",
        "| kernel | ms | share |",
        "|---|---|---|",
        *(
            f"| `{kernel[:70]}` | {time:.3f} | {time / whole:.0%} |"
            for kernel, time in found.items()
            if time >= 0.01 * whole
        ),
    ]


def main() -> None:
    """Check, measure and write."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--main", type=Path, help="a checkout of mamba-ssm's main branch")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--only", default="", help="only cases whose names begin with this")
    parser.add_argument("--scan-alone", action="store_true", help="measure only our own scan")
    options = parser.parse_args()
    alone = options.scan_alone
    rows, profiles = {}, {}
    for name, (shape, documents) in CASES.items():
        if name.startswith(options.only) and ways_of(shape, alone):
            check(shape, documents, alone)
            rows[name], profiles[name] = measure(shape, documents, options.main, alone)
            print(name, rows[name], profiles[name], flush=True)
    device = torch.cuda.get_device_name()
    report = stack("triton", "tilelang", "mamba-ssm")
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    lines = [
        "# Mamba-3's core, bf16, forward plus backward, milliseconds",
        "",
        "Written by `benchmarks/mamba3.py`, after a comparison of results and gradients.",
        "",
        *(f"- {name}: {value}" for name, value in report.items()),
        "",
        "| case | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 1) + "|",
        *(
            f"| {name} | " + " | ".join(f"{row[c]:.2f}" if c in row else "" for c in columns) + " |"
            for name, row in rows.items()
        ),
    ]
    for name, found in profiles.items():
        for way, times in found.items():
            lines += kernel_table(f"{name}, {way}", times)
    lines.append("")
    options.out.mkdir(parents=True, exist_ok=True)
    stem = ("mamba3_scan_" if alone else "mamba3_") + device.split()[-1].lower()
    whole = report | {"rows": rows, "kernels": profiles}
    (options.out / f"{stem}.json").write_text(json.dumps(whole, indent=1) + "\n")
    (options.out / f"{stem}.md").write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
