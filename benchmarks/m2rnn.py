"""M2RNN's recurrence on one GPU: our kernels against the authors'.

usage: python -m benchmarks.m2rnn [--xma ROOT] [--out benchmarks/results]

ROOT holds a checkout of the authors' kernels, the package `xma`. Both have the same bf16 inputs,
NAM56R's 51 heads of 64 x 16, 8 sequences of 4096 tokens. Before any time, ours is compared with
fp64 by the checks of the tests. Theirs keeps states in bf16, so how far it is from ours is written
down and does not stop the run; "ours, clipped" clips the gradients of states at 1, and is as far
from ours as that changes them. Writes m2rnn_DEVICE.json, medians of 10 with CUDA events.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
import torch
from torch import Tensor

from benchmarks.harness import results
from benchmarks.harness.gpu import both_ways, by_kernel, card, distance, median
from cppmega.ops.m2rnn import m2rnn
from tests.ops.m2rnn import checks

SHAPE = checks.Shape(s=4096, b=8, heads=51, k=64, v=16)

Way = Callable[..., Tensor]


def of_authors(root: Path) -> Way:
    """Their recurrence, as ours is called; it takes the batch first, and the decay itself."""
    sys.path.insert(0, str(root))
    theirs = importlib.import_module("xma.layers").m2rnn

    def call(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, log_decay: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1) for x in (q.unsqueeze(2), k.unsqueeze(2), v))
        decay = log_decay.exp().to(v.dtype).transpose(0, 1)
        out: Tensor = theirs(q, k, v, weight, decay)[0]
        return out.transpose(0, 1)

    return call


@click.command(help=__doc__)
@results.folder_option("--xma", "a checkout of the authors' kernels")
@results.out_option()
def main(xma: Path | None, out: Path) -> None:
    small = checks.drawn(SHAPE._replace(s=333, b=2), torch.bfloat16, "cuda")
    checks.check(checks.RECURRENCE, small)
    clipped = partial(m2rnn, bounds=None, gradient_clipping=1.0)
    ways: dict[str, Way] = {"ours": partial(m2rnn, bounds=None), "ours, clipped": clipped}
    if xma is not None:
        ways["authors"] = of_authors(xma)
    given = checks.drawn(SHAPE, torch.bfloat16, "cuda")
    ours = both_ways(ways["ours"], given)
    report: dict[str, object] = {**results.stack("triton"), "shape": SHAPE._asdict()}
    for name, way in ways.items():
        apart = [distance(b, a) for a, b in zip(ours, both_ways(way, given), strict=True)]
        with torch.no_grad():
            forward = median(way, *given)
        kernels = by_kernel(both_ways, way, given)
        report[name] = {
            "forward, ms": forward,
            "both, ms": median(both_ways, way, given),
            "apart from ours": apart,
            "kernels, ms": {kernel[:60]: ms for kernel, ms in kernels.items() if ms >= 0.1},
        }
    results.write(out, f"m2rnn_{card()}", report)


if __name__ == "__main__":
    main()
