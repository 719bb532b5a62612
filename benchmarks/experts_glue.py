"""Compare what surrounds the products of experts with what it replaces, on one GPU.

usage: python -m benchmarks.experts_glue [--out benchmarks/results]

Two things, at the widths of NAM56R and with the tokens of a micro-batch of four sequences, of
which experts have unequal numbers. First the GELU of experts with the routers' probabilities:
Megatron's code, the same compiled by torch, and the kernel, next to a copy, the lower bound of what
reads and writes each element once. Then the experts of a rank with tokens from several: sorted by
expert with Transformer Engine's kernels and sorted back, and with a group of the products for each
chunk, both with the kernel between the products. Results must be those of fp64. All take turns.
Writes experts_glue_CARD.json and .md.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.harness import results
from benchmarks.harness.gpu import card, distances, elapsed, refuse, rounds, upstream_of
from cppmega.ops.pointwise import weighted_gelu_naive as weighted_gelu_reference
from cppmega.ops.pointwise.grouped_linear import grouped_linear
from cppmega.ops.pointwise.weighted_gelu import weighted_gelu

HIDDEN, WIDTH, EXPERTS, ROWS = 4096, 896, 16, 65536
ROUNDS, CALLS = 12, 5
LIMIT = 1e-2
"""The largest distance from fp64 that results in bf16 may have."""
NAMES = ("results", "gradient of the rows", "gradient of the probabilities")
Work = Callable[[], Any]


def stock(x: Tensor, probs: Tensor) -> Tensor:
    """What `TEGroupedMLP` of megatron-core 0.19.2 computes between the products."""
    return (functional.gelu(x) * probs).to(x.dtype)


def turns(everyone: dict[str, Work]) -> dict[str, float]:
    """Median milliseconds of each."""
    times: dict[str, list[float]] = {name: [] for name in everyone}
    for _, name in rounds(everyone, ROUNDS + 2):
        times[name] += elapsed(
            lambda call: [call() for _ in range(CALLS)], everyone[name], repeats=1, queued=True
        )
    return {name: statistics.median(found[2:]) / CALLS for name, found in times.items()}


def activation() -> dict[str, Any]:
    """Milliseconds of both directions, and distances from fp64, of each implementation."""
    x = torch.randn(ROWS, WIDTH, device="cuda").bfloat16().requires_grad_()
    probs = torch.rand(ROWS, 1, device="cuda", requires_grad=True)
    given = upstream_of(x.shape, x.dtype)
    with torch.no_grad():
        wide = x.double(), probs.double()
        exact = (
            weighted_gelu_reference.weighted_gelu(*wide),
            *weighted_gelu_reference.gradients(*wide, given.double()),
        )
    calls: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "stock": stock,
        "compiled": torch.compile(stock),
        "kernel": weighted_gelu,
    }
    errors, forward, backward = {}, {}, {}
    for name, call in calls.items():
        out = call(x, probs)
        found = (out.detach(), *torch.autograd.grad(out, (x, probs), given, retain_graph=True))
        errors[name] = distances(NAMES, found, exact)
        refuse(name, errors[name], LIMIT)
        forward[name] = lambda call=call: call(x, probs)
        backward[name] = lambda out=out: torch.autograd.grad(
            out, (x, probs), given, retain_graph=True
        )
    rows = x.detach()
    of_gelu = turns({**forward, "copy": rows.clone})
    # Two tensors are read, and one is written.
    of_gradients = turns({**backward, "copy": lambda: torch.add(rows, given)})
    bytes_ = rows.numel() * rows.element_size()
    return {
        "errors": errors,
        "forward": {
            name: {"ms": ms, "tb_s": 2 * bytes_ / ms / 1e9} for name, ms in of_gelu.items()
        },
        "backward": {
            name: {"ms": ms, "tb_s": 3 * bytes_ / ms / 1e9} for name, ms in of_gradients.items()
        },
    }


class Layer:
    """The experts of one rank, tokens that arrived from several, and both ways to compute them."""

    def __init__(self, ranks: int) -> None:
        from transformer_engine.pytorch.cpp_extensions import general_grouped_gemm

        self.products = general_grouped_gemm
        self.experts = EXPERTS // ranks
        self.sizes = unequal(ranks * self.experts)
        self.on_gpu = torch.tensor(self.sizes, device="cuda")
        places = torch.arange(len(self.sizes), device="cuda")
        self.order = places.view(ranks, -1).t().flatten()
        self.back = places.view(-1, ranks).t().flatten()
        self.by_expert = self.on_gpu.view(ranks, -1).t().flatten()
        self.x = torch.randn(ROWS, HIDDEN, device="cuda").bfloat16().requires_grad_()
        self.probs = torch.rand(ROWS, device="cuda", requires_grad=True)
        self.given = upstream_of(self.x.shape, self.x.dtype)
        self.weights = [self._weights(WIDTH, HIDDEN), self._weights(HIDDEN, WIDTH)]

    def _weights(self, rows: int, columns: int) -> list[Any]:
        made: list[Any] = []
        for _ in range(self.experts):
            drawn = torch.randn(rows, columns, device="cuda") / columns**0.5
            made.append(torch.nn.Parameter(drawn.bfloat16()))
            made[-1].main_grad = torch.zeros(rows, columns, device="cuda")
            made[-1].grad_added_to_main_grad = False
        return made

    def sort(self, rows: Tensor, probs: Tensor, sizes: Tensor, order: Tensor) -> Any:
        from transformer_engine.pytorch.permutation import moe_sort_chunks_by_index_with_probs

        return moe_sort_chunks_by_index_with_probs(rows, probs, sizes, order)

    def sort_back(self, rows: Tensor) -> Tensor:
        from transformer_engine.pytorch.permutation import moe_sort_chunks_by_index

        sorted_: Tensor = moe_sort_chunks_by_index(rows, self.by_expert, self.back)
        return sorted_

    def mlp(self, rows: Tensor, probs: Tensor, splits: list[int]) -> Tensor:
        first, second = self.weights
        inner = grouped_linear(rows, splits, first, self.products, fused=True)
        inner = weighted_gelu(inner, probs[:, None])
        return grouped_linear(inner, splits, second, self.products, fused=True)

    def sorted(self) -> Tensor:
        rows, probs = self.sort(self.x, self.probs, self.on_gpu, self.order)
        per_expert = torch.tensor(self.sizes).view(-1, self.experts).sum(0).tolist()
        return self.sort_back(self.mlp(rows, probs, per_expert))

    def unsorted(self) -> Tensor:
        return self.mlp(self.x, self.probs, self.sizes)

    def sorts(self) -> None:
        """The four sorts alone, forward and backward."""
        self.x.grad = self.probs.grad = None  # nothing is added to other gradients
        rows, probs = self.sort(self.x, self.probs, self.on_gpu, self.order)
        torch.autograd.backward((rows, probs), (self.given, self.probs.detach()))
        self.x.grad = None
        self.sort_back(self.x).backward(self.given)

    def exact(self) -> tuple[Tensor, ...]:
        """What both compute, in fp64."""
        x, probs = (each.detach().double().requires_grad_() for each in (self.x, self.probs))
        chunks = enumerate(zip(x.split(self.sizes), probs.split(self.sizes), strict=True))
        first, second = self.weights
        done = []
        for at, (rows, own) in chunks:
            one, two = (each[at % self.experts].detach().double() for each in (first, second))
            done.append(functional.gelu(rows @ one.t()) * own[:, None] @ two.t())
        out = torch.cat(done)
        return (out.detach(), *torch.autograd.grad(out, (x, probs), self.given.double()))


def unequal(parts: int) -> list[int]:
    """Rows of each part; the largest has about three times the mean."""
    shares = torch.linspace(0.2, 1.8, parts)[torch.randperm(parts)] ** 2
    sizes = (ROWS * shares / shares.sum()).long()
    sizes[-1] += ROWS - sizes.sum()
    return [int(size) for size in sizes]


def experts(ranks: int) -> dict[str, Any]:
    """Milliseconds, forward and backward, with tokens of some ranks, sorted and not."""
    torch.manual_seed(ranks)
    layer = Layer(ranks)
    exact = layer.exact()
    calls = {"sorted": layer.sorted, "unsorted": layer.unsorted}
    leaves = (layer.x, layer.probs)
    weights = [weight for each in layer.weights for weight in each]

    def both(call: Callable[[], Tensor]) -> Tensor:
        for leaf in (*leaves, *weights):
            leaf.grad = None
        out = call()
        out.backward(layer.given)
        return out

    errors, sums = {}, {}
    for name, call in calls.items():
        for weight in weights:
            weight.main_grad.zero_()
        out = both(call)
        errors[name] = distances(NAMES, (out, *(leaf.grad for leaf in leaves)), exact)
        refuse(name, errors[name], LIMIT)
        sums[name] = [weight.main_grad.clone() for weight in weights]
    apart = distances(map(str, range(len(weights))), sums["unsorted"], sums["sorted"])
    errors["unsorted"]["weight gradients, from those sorted"] = max(apart.values())
    refuse("unsorted", errors["unsorted"], LIMIT)
    del exact, out, sums
    work: dict[str, Work] = {name: lambda call=call: both(call) for name, call in calls.items()}
    found = turns({**work, "sorts": layer.sorts})
    bytes_ = 4 * 2 * layer.x.numel() * layer.x.element_size()
    return {"errors": errors, "ms": found, "sorts_tb_s": bytes_ / found["sorts"] / 1e9}


def page(report: dict[str, Any]) -> str:
    gelu, chunks = report["activation"], report["experts"]
    speed = ("TB/s", ".2f")
    directions = [(f"{name}, ms", ".3f") for name in ("forward", "backward")]
    ways = [(f"{name}, ms", ".3f") for name in ("sorted", "unsorted", "sorts alone")]
    rows = (
        [name, *gelu["forward"][name].values(), *gelu["backward"][name].values()]
        for name in gelu["forward"]
    )
    of_experts = (
        [ranks, *(found["ms"][way] for way in ("sorted", "unsorted", "sorts")), found["sorts_tb_s"]]
        for ranks, found in chunks.items()
    )
    errors = (
        [who, name, error]
        for found in (gelu["errors"], *(found["errors"] for found in chunks.values()))
        for who, each in found.items()
        for name, error in each.items()
    )
    facts = {key: value for key, value in report.items() if key not in ("activation", "experts")}
    return results.page(
        "# Between the products of experts",
        f"Written by `benchmarks/experts_glue.py`: {ROWS} rows, experts of {HIDDEN} x {WIDTH} in "
        "bf16.",
        results.bullets(facts),
        "GELU with probabilities. TB/s count each element once; `copy` of the backward pass reads "
        "two tensors and writes one.",
        results.table(["", directions[0], speed, directions[1], speed], rows),
        f"The experts of a rank, {EXPERTS} of all ranks, forward and backward, with tokens from "
        "some ranks; the four sorts alone are part of the first.",
        results.table(["ranks", *ways, speed], of_experts),
        "Relative distances from fp64.",
        results.table(["", "of", ("distance", ".1e")], errors),
    )


@click.command(help=__doc__)
@results.out_option()
def main(out: Path) -> None:
    os.environ.setdefault("NVTE_USE_CUTLASS_GROUPED_GEMM", "1")  # as in the recipes
    report = {
        **results.stack("triton", "transformer-engine"),
        "activation": activation(),
        "experts": {str(ranks): experts(ranks) for ranks in (1, 2)},
    }
    results.write(out, f"experts_glue_{card()}", report, page(report))


if __name__ == "__main__":
    main()
