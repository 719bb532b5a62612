"""What each choice of a whole recipe costs or brings: one short run per row, on the same GPUs.

    python -m benchmarks.whole.rows --site SITE --work SCRATCH --out DIR --data TRAIN [--only ROWS]

Every row but the first changes one thing of the recipe; `ROWS` says what.

--set changes the recipe of all rows. Each run is a process, whose last two steps are profiled and
not measured. DIR/RECIPE_rows.json and .md are written after each, and a run that is in there is not
repeated. Out of memory is a result, and so are the steps of a run that was stopped at its time
limit. Calls with other rows and another SCRATCH may run at the same time on other GPUs of the host,
and write to the same DIR; --note then says so.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import click

from benchmarks.harness import results, runs
from benchmarks.harness.results import Places
from benchmarks.harness.runs import STARTS, Bench, TimeIsUp
from benchmarks.slices.training import GRAPH_POOLS, WARM, apart, curve, measured, steps_of
from cppmega.recipe import Recipe
from cppmega.recipe import index as recipes_index
from cppmega.recipe.memory import MAMBA_RECOMPUTE, estimate
from tools.markdown import table

_PROFILED = 2


@dataclass(frozen=True)
class Row:
    """One run: changes to the recipe, and what has no field there."""

    changes: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    """Megatron's own."""
    without: tuple[str, ...] = ()
    """Pages that are left out."""
    shares: bool = False
    """A step has the sequences of one of the recipe's replicas."""

    def of(self, recipe: Recipe) -> Row:
        """The row with the changes that depend on the recipe."""
        if not self.shares:
            return self
        batch = recipe.global_batch_size // recipe.data_parallel_size
        return replace(self, changes=(*self.changes, f"global_batch_size={batch}"))

    @property
    def described(self) -> list[str]:
        variables = (f"{name}={value}" for name, value in self.variables.items())
        without = (f"without {name}" for name in self.without)
        return [*self.changes, *variables, *self.arguments, *without]


_MAMBA = f"gates=({MAMBA_RECOMPUTE},)"
_RECOMPUTED = ("recompute_modules=('moe_act', 'mlp', 'mla_up_proj')", _MAMBA)
_LAYERS = ("recompute_modules=('moe', 'mlp', 'mla_up_proj')", _MAMBA)
_KEPT = "gates=()"
_FP8 = ("precision=fp8", "fp8_recipe=tensorwise")
_ATTENTION = "dsa_attention_kernels"
_DSA = (_ATTENTION, "dsa_indexer_kernels", "dsa_indexer_prologue")
_PLAIN_DSA = f"patches={STARTS}"  # the recipe asks for its kernels by name
_SCORES = "recompute_modules=('core_attn', 'moe_act', 'mlp', 'mla_up_proj')"
_GLUE = (
    *("mla_rope_kernel", "router_gating_backward", "te_plain_layers", "te_permutation_calls"),
    *("optimizer_copies_at_once", "grad_checks_no_host_sync"),
)
_EXPERTS_GLUE = ("moe_chunks_unsorted", "expert_gelu_kernel")
_ONE = "micro_batch_size=1"
_ALONE = (
    *("gpus=1", "tensor_model_parallel_size=1", "pipeline_model_parallel_size=1"),
    *("expert_model_parallel_size=1", "overlap_grad_reduce=False", "overlap_param_gather=False"),
)
_GRAPHS = ("cuda_graph_impl=transformer_engine", "cuda_graph_modules=('attn', 'moe_router')")
_LOCAL, _EXPANDS = "cuda_graph_impl=local", {"NCCL_GRAPH_REGISTER": "0"}
_HEADS = "cross_entropy_fusion_impl=native"
_STOCK = (_SCORES, _MAMBA, _HEADS, _PLAIN_DSA)
ROWS: Mapping[str, Row] = {
    "recipe": Row(),
    "recomputed": Row(_RECOMPUTED),
    "experts": Row((_LAYERS[0], _KEPT)),
    "kept": Row(("recompute_modules=()", _KEPT, "micro_batch_size=4")),
    "four": Row((*_LAYERS, "micro_batch_size=4")),
    "eight": Row((*_LAYERS, "micro_batch_size=8")),
    "permute": Row(("moe_permute_fusion=False",)),
    "router": Row(("moe_router_fusion=False",)),
    "grads": Row(("gradient_accumulation_fusion=False",)),
    # Every expert of a layer has products of its own.
    "products": Row(variables={"NVTE_USE_CUTLASS_GROUPED_GEMM": "0"}),
    "gathered": Row(("moe_token_dispatcher_type=allgather",)),
    "beside": Row(arguments=("--moe-shared-expert-overlap",)),
    "averaged": Row(("ddp_average_in_collective=True",)),
    "shared": Row(("dsa_index_pattern=FSSFSSFSS",)),
    "heads": Row((_HEADS,)),
    "dsa": Row((_PLAIN_DSA, _SCORES), without=_DSA),
    "plain": Row((_PLAIN_DSA,), without=_DSA),
    "mhc": Row(("use_fused_mhc=False",)),
    "alone": Row(_ALONE),
    "share": Row(_ALONE, shares=True),
    # Without the pages that save time between the large kernels.
    "glue": Row(without=_GLUE),
    # Without what is new between the products of experts.
    "experts_glue": Row(without=_EXPERTS_GLUE),
    "sorted": Row(without=_EXPERTS_GLUE[:1]),
    "stock": Row((*_STOCK, _ONE), without=(*_DSA, *_GLUE)),
    "stock_two": Row((*_STOCK, "micro_batch_size=2"), without=(*_DSA, *_GLUE)),
    "one": Row((_ONE,)),
    # The variable is for expandable segments.
    "graphs": Row((_ONE, *_GRAPHS), _EXPANDS),
    # Megatron's own graphs, of the mixers, and of everything between the experts.
    "mixer_graphs": Row((_LOCAL, "cuda_graph_modules=('mamba',)"), _EXPANDS),
    "layer_graphs": Row((_LOCAL, "cuda_graph_modules=('mamba', 'attn', 'moe_router')"), _EXPANDS),
    "fp8": Row(_FP8),
    "fp8_experts": Row((*_FP8, "gates=(('CPPMEGA_SELECTIVE_FP8_MOE', '1'),)")),
    "fp8_gather": Row(_FP8, arguments=("--fp8-param-gather",)),
    "again": Row(),  # how far equal runs are apart
}


@click.command(help=__doc__)
@results.places("Prefix of the training data.")
@click.option("--recipe", default="nam56r_h200_2gpu_ep2", show_default=True)
@click.option("--set", "changes", multiple=True, metavar="FIELD=VALUE", help="Change the recipe.")
@click.option("--only", help="Rows, in this order [all].")
@click.option("--steps", default=25, show_default=True, help="Steps of a run, ten to warm up.")
@click.option("--timeout", default=400.0, show_default=True, help="Seconds for one run.")
@click.option("--name", help="Of the result's files [RECIPE_rows].")
@click.option("--note", default="", help="What else the page says.")
def main(
    places: Places,
    recipe: str,
    changes: tuple[str, ...],
    only: str | None,
    steps: int,
    timeout: float,
    name: str | None,
    note: str,
) -> None:
    chosen = results.chosen(only, ROWS, "rows")
    places.create()
    name = name or f"{recipe}_rows"
    base = recipes_index.with_text(recipes_index.load(recipe), changes)
    header = {**runs.header(Bench(base, changes, *places, timeout)), "benchmark": "whole_rows"}
    header |= {"note": note} if note else {}
    for each in chosen:
        if each in results.read(places.out, name).get("rows", {}):
            continue
        row = ROWS[each].of(base)
        every = (f"train_iters={steps + _PROFILED}", *changes, *row.changes)
        made = recipes_index.with_text(recipes_index.load(recipe), every)
        variables = {**dict(made.wanted_gates), **row.variables}
        with mock.patch.dict(os.environ, variables):  # trees and runs are made by other processes
            if MAMBA_RECOMPUTE[0] not in variables:
                os.environ.pop(MAMBA_RECOMPUTE[0], None)
            found = ran(Bench(made, every, *places, timeout), each, steps, row)
        fused = _ATTENTION not in row.without
        found["changes"], found["gpus"] = row.described, made.gpus
        found["global_batch_size"] = made.global_batch_size
        found["estimate_gib"] = round(estimate(made, attends=fused).gib, 1)
        with results.changing(places.out, name) as result:
            result.update(header)
            result.setdefault("rows", {})[each] = found
            (places.out / f"{name}.md").write_text(page(result))
    print(page(results.read(places.out, name)))


def ran(bench: Bench, name: str, steps: int, row: Row) -> dict[str, Any]:
    parts = sorted(f"{variable}={value}" for variable, value in bench.recipe.wanted_gates)
    parts += [f"without-{name}"] if row.without else []
    left_out = (word for page in row.without for word in ("--without", page))
    tree = bench.tree(",".join(parts) or "plain", *left_out)
    profile = runs.profiled(_PROFILED, steps, bench.out / f"{name}-profile")
    try:
        rows = runs.trained(bench, name, tree, *profile, "--", *row.arguments)
    except TimeIsUp:
        rows = bench.rows(name)
        if len(steps_of(rows)) <= WARM:
            raise
    if rows is None:
        return {"out_of_memory": True}
    unprofiled = sum(not row["profiled"] for row in steps_of(rows))
    return {**measured(rows), "unprofiled_steps": unprofiled}


def page(result: dict[str, Any]) -> str:
    rows = {name: result["rows"][name] for name in ROWS if name in result["rows"]}
    first = next((row for row in rows.values() if "out_of_memory" not in row), None)
    return results.page(
        f"# {result['recipe']}, one choice after the other, {result['date']}",
        f"Written by `benchmarks/whole_rows.py`. {runs.on(result)} "
        f"{', '.join(result['changes']) or 'The recipe as it is'}; every row changes one thing "
        "of the first. Rates are medians of the steps after the tenth that were not profiled, and "
        "ratios compare those steps that both rows have. The last two columns compare the losses "
        "of a row's steps with those of the first, if they have the same sequences: how much the "
        "mean of the last ten is higher, and the largest difference.",
        result.get("note", ""),
        table(_TITLES, (_cells(name, row, first) for name, row in rows.items())),
    )


_TITLES = (
    *("row", "changes", "steps", "tokens/s per GPU", "ratio", "TFLOP/s", "peak, GiB", "estimate"),
    *(GRAPH_POOLS, "last losses", "largest difference"),
)
_LAST = 10
"""Steps whose losses are averaged."""


def _cells(name: str, row: dict[str, Any], first: dict[str, Any] | None) -> tuple[str, ...]:
    changes = ", ".join(row["changes"]) or "none"
    if first is None or "out_of_memory" in row:
        memory = f"{row['estimate_gib']:.1f}"
        return (name, changes, "", "out of memory", *[""] * 3, memory, *[""] * 3)
    rate = f"{row['tokens_per_second'] / row['gpus']:.0f}"
    return (
        *(name, changes, str(row["unprofiled_steps"]), rate, f"{_faster(row, first):.3f}"),
        *(f"{row['tflops_per_gpu']:.0f}", f"{row['peak_gib']:.1f}", f"{row['estimate_gib']:.1f}"),
        f"{row['graph_pool_gib']:.1f}" if "graph_pool_gib" in row else "",
        *_compared(row, first),
    )


def _faster(row: dict[str, Any], first: dict[str, Any]) -> float:
    """The rate per GPU relative to the first row's, by median seconds of the steps of both."""
    last = min(row["unprofiled_steps"], first["unprofiled_steps"])
    own, others = (
        statistics.median(seconds for step, *_, seconds in each["curve"] if WARM < step <= last)
        for each in (row, first)
    )
    sequences = row["global_batch_size"] / first["global_batch_size"]
    return others / own * sequences * first["gpus"] / row["gpus"]


def _compared(row: dict[str, Any], first: dict[str, Any]) -> tuple[str, str]:
    """How the losses of a row differ from those of the first, over the steps of both."""
    if row is first or row["global_batch_size"] != first["global_batch_size"]:
        return ("", "")  # of other sequences, losses say nothing
    own, others = curve(row), curve(first)
    difference = apart(own, others)
    if difference is None:
        return ("", "")
    last = sorted(own.keys() & others.keys())[-_LAST:]
    higher = statistics.mean(own[step] - others[step] for step in last)
    return (f"{higher:+.4f}", f"{difference:.4f}")


if __name__ == "__main__":
    main()
