"""Measure linear cross-entropy with the vocabulary split over the GPUs of one host.

    torchrun --nproc-per-node 2 benchmarks/linear_cross_entropy_tp.py --out DIR

First every rank compares loss, its dX (summed over the ranks) and its part of dW with fp64 at a
small shape. Then the median time of forward and backward at N=32768, H=4096, V=131072 for the
unfused path (Megatron's loss on the logits of the rank) and cppmega's, TFLOP/s per GPU counted as
6*N*H*V/tp, and peak memory above inputs, dX and dW. Rank 0 writes
`linear_cross_entropy_tp<ranks>.json` to DIR.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.linear_cross_entropy import exact, measure, step
from benchmarks.linear_cross_entropy_rivals import Case, Rival, ours

TOKENS, HIDDEN, VOCABULARY = 32768, 4096, 131072


def part(case: Case) -> Case:
    """The case with this rank's rows of the weight."""
    mine = case.w.detach().chunk(dist.get_world_size())[dist.get_rank()].clone()
    return replace(case, w=mine.requires_grad_())


class _Copied(torch.autograd.Function):
    """Identity whose backward sums over the ranks, as before a column-parallel layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        dist.all_reduce(gradient)
        return gradient


def stock(case: Case) -> Tensor:
    """Megatron's loss over materialized logits."""
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    copied = _Copied.apply(case.x)  # type: ignore[no-untyped-call]
    logits = torch.matmul(copied, case.w.t())
    return case.reduce(
        vocab_parallel_cross_entropy(logits, case.targets, tp_group=dist.group.WORLD)
    )


def check(rival: Rival) -> dict[str, float]:
    """Errors against fp64; raises SystemExit if they exceed those of bf16."""
    whole = Case.random(2085, 1024, 4096 * 8)
    loss, d_x, d_w = exact(whole)
    case = part(whole)
    got = step(rival, case)
    mine = d_w.chunk(dist.get_world_size())[dist.get_rank()]
    errors = {
        name: float((found.double() - true).norm() / true.norm())
        for name, found, true in (
            ("loss", got, loss),
            ("dX", case.x.grad, d_x),
            ("dW", case.w.grad, mine),
        )
        if found is not None
    }
    if errors["loss"] > 1e-4 or max(errors.values()) > 2e-2:
        raise SystemExit(f"{rival.name} is wrong on rank {dist.get_rank()}: {errors}")
    return errors


def main() -> None:
    """Measure on this rank; rank 0 writes the result."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    out = parser.parse_args().out
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    report = []
    split = ours(backend="triton", upstream="weighted-scalar", tp_group=dist.group.WORLD)
    for rival in (Rival("stock", stock, None), Rival("ours", split, "_row_kernel")):
        errors = check(rival)
        row = measure(rival, part(Case.random(TOKENS, HIDDEN, VOCABULARY)))
        torch.cuda.empty_cache()
        report.append(
            {
                "name": rival.name,
                "tp": ranks,
                "tokens": TOKENS,
                "vocabulary": VOCABULARY,
                "GPU": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "ms": row.milliseconds,
                "TFLOP/s per GPU": row.tflops,
                "GiB above inputs, dX, dW": row.above_gradients_gib,
                "errors": errors,
            }
        )
        if rank == 0:
            print(report[-1], flush=True)
    if rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        path = out / f"linear_cross_entropy_tp{ranks}.json"
        path.write_text(json.dumps(report, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
