"""Train a recipe on stock Megatron and with the overlay, one after the other on the same GPUs.

"Stock" is pristine except for the two patches without which it does not start from a wheel;
"linear" is the overlay with its linear cross-entropy turned on. The runs see the same data in the
same order from the same weights. "tilelang" is the overlay with the fused backend of DSA,
"stock-tilelang" is stock with it, which does not support NAM56R's widths. How well a killed run
resumes is measured by `benchmarks.whole.training`.

    python -m benchmarks.slices.training run --site SITE --work SCRATCH --out DIR
    python -m benchmarks.slices.training plot DIR/nam56r_h200_slice.json
"""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import click

from benchmarks.harness import results, runs
from benchmarks.harness.results import FOLDER, Places
from benchmarks.harness.runs import Bench, Row
from cppmega.recipe import index as recipes_index

_TILELANG = ("dsa_kernel_backend=tilelang", "dsa_indexer_use_sparse_loss=True")
_OPTIONS = {
    "linear": ("--set", "cross_entropy_fusion_impl=linear"),
    "tilelang": tuple(word for change in _TILELANG for word in ("--set", change)),
    # As arguments, which come last: with the fields, the recipe would ask for the overlay's patch.
    "stock-tilelang": ("--", "--dsa-kernel-backend", "tilelang", "--dsa-indexer-use-sparse-loss"),
}


WARM = 10
"""Steps left out of the medians."""
GRAPH_POOLS = "reserved for CUDA graphs, GiB"
"""Title of `graph_pool_gib`; tables of the slices leave it out where no run has graphs."""
COLUMNS = {
    "stock": "stock, made to start",
    "stock-tilelang": "stock, made to start, TileLang",
    "overlay": "with the overlay",
    "tilelang": "with the overlay, TileLang",
    "linear": "and linear cross-entropy",
}
_ROWS = {
    "overlay": "overlay digest",
    "milliseconds": "step, ms",
    "tokens_per_second": "tokens/s",
    "tflops_per_gpu": "TFLOP/s per GPU, every layer counted",
    "tflops_per_gpu_by_megatron": "TFLOP/s per GPU, as Megatron reports",
    "peak_gib": "peak memory, GiB",
    "graph_pool_gib": GRAPH_POOLS,
    "first_loss": "first loss",
    "last_loss": "last loss",
}


def measured(rows: list[Row]) -> dict[str, Any]:
    """Curves of one run, and medians of its steps that were not profiled."""
    start = next(row for row in rows if "start" in row)
    steps = steps_of(rows)
    if any(row.get("mock_data") for row in rows):
        raise click.ClickException("the run saw mock data, which must not appear in a result")
    for row in steps:
        if not all(math.isfinite(row[key] or math.nan) for key in ("loss", "grad_norm")):
            raise click.ClickException(f"step {row['step']}: {row['loss']=} {row['grad_norm']=}")
    warm = [row for row in steps[WARM:] if not row.get("profiled", False)]
    if not warm:
        raise click.ClickException(f"{len(steps)} steps are too few: {WARM} warm up")
    seconds = statistics.median(row["seconds"] for row in warm)
    middle = min(warm, key=lambda row: abs(row["seconds"] - seconds))
    return {
        "overlay": start["overlay"],
        "steps": len(steps),
        "milliseconds": round(1000 * seconds, 1),
        "tokens_per_second": round(middle["tokens_per_second"], 1),
        "tflops_per_gpu": round(middle["tflops_per_gpu"], 1),
        "tflops_per_gpu_by_megatron": middle["tflops_per_gpu_by_megatron"],
        "peak_gib": round(max(row["peak_gib"] for row in steps), 2),
        **graph_pools(steps),
        "first_loss": steps[0]["loss"],
        "last_loss": steps[-1]["loss"],
        "curve": [[row["step"], row["loss"], row["grad_norm"], row["seconds"]] for row in steps],
        "mtp": [
            [row["step"], *(x for name, x in sorted(row["losses"].items()) if name[:3] == "mtp")]
            for row in steps
        ],
    }


def steps_of(rows: list[Row]) -> list[Row]:
    return [row for row in rows if "step" in row]


def without_curves(run: dict[str, Any]) -> dict[str, Any]:
    """A measured run without what it has for each step."""
    return {key: value for key, value in run.items() if key not in ("curve", "mtp")}


def graph_pools(steps: list[Row]) -> dict[str, float]:
    """The most that a run's CUDA graphs kept reserved, GiB; empty for a run without."""
    found = [row["graph_pool_gib"] for row in steps if row.get("graph_pool_gib") is not None]
    return {"graph_pool_gib": round(max(found), 2)} if found else {}


def losses(rows: list[Row]) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in steps_of(rows)}


def curve(run: dict[str, Any]) -> dict[int, float]:
    """The loss of every step of a measured run."""
    return {step: loss for step, loss, *_ in run["curve"]}


def apart(one: dict[int, float], other: dict[int, float]) -> float | None:
    """The largest difference of losses over the steps that both have; None without any."""
    return max((abs(one[step] - other[step]) for step in one.keys() & other.keys()), default=None)


def headline(result: dict[str, Any]) -> str:
    parts = [
        f"{name} out of memory"
        if "out_of_memory" in row
        else f"{name} {row['tokens_per_second']:.0f} tokens/s, {row['peak_gib']:.1f} GiB"
        for name, row in result["runs"].items()
    ]
    return f"{result['gpus']} x {result['stack']['gpu']}: " + "; ".join(parts)


def save(out: Path, name: str, result: dict[str, Any]) -> str:
    """Write the result of a recipe; its page."""
    result["headline"] = headline(result)
    return results.save(out, name, result, table(result))


def title(result: dict[str, Any]) -> str:
    """The first line of a page: recipe, changes and date."""
    changes = f" ({', '.join(result['changes'])})" if result["changes"] else ""
    return f"# {result['recipe']}{changes}, {result['date']}"


def table(result: dict[str, Any]) -> str:
    data = result["data"]
    found = {name: result["runs"][name] for name in COLUMNS if name in result["runs"]}
    rows = (
        [
            label,
            *(
                str(run.get(key, "out of memory" * ("out_of_memory" in run)))
                for run in found.values()
            ),
        ]
        for key, label in _ROWS.items()
        if key == "tokens_per_second" or any(key in run for run in found.values())
    )
    return results.page(
        title(result),
        f"{runs.on(result)}\n"
        f"Data {data['fingerprint']}: {data['documents']} documents, {data['tokens']} tokens.",
        results.table(["", *(COLUMNS[name] for name in found)], rows),
        _resumed(result["resume"]) if "resume" in result else "",
    )


def _resumed(found: dict[str, Any]) -> str:
    first, last = found["compared_steps"]
    return (
        f"Killed after step {found['killed_after_step']}, resumed from step "
        f"{found['resumed_from_step']}: over steps {first} to {last} the loss differs by at most "
        f"{found['largest_difference']:.2e} (it spans {found['loss_span']:.2f}; before the kill "
        f"the two differ by {found['unkilled_difference']:.2e}, the noise of equal runs)."
    )


def draw(result: Path) -> Path:
    """Draw the curves of a result into a PNG next to it."""
    data, target = json.loads(result.read_text()), result.with_suffix(".png")
    with results.drawing(target, 1, 2) as ((left, right),):
        for name, row in data["runs"].items():
            if "out_of_memory" not in row:
                steps, losses, _, seconds = zip(*row["curve"], strict=True)
                left.plot(steps, losses, label=name)
                right.plot(steps, [1000 * each for each in seconds], label=name)
        left.set(xlabel="step", ylabel="loss, nats", title=f"{data['recipe']} on real data")
        right.set(xlabel="step", ylabel="step, ms", yscale="log", title=data["stack"]["gpu"])
        left.legend()
    return target


@click.group(help=__doc__)
def main() -> None:
    """Stock against overlay on a GPU."""


@main.command()
@results.places("Prepared dataset [Python's own sources].", required=False)
@click.option("--recipe", default="nam56r_h200_slice", show_default=True)
@click.option("--set", "changes", multiple=True, metavar="FIELD=VALUE", help="Change the recipe.")
@click.option("--runs", "which", default="stock,overlay", help="Also linear and tilelang.")
@click.option("--name", help="Of the result's files [the recipe's].")
@click.option("--timeout", default=500.0, show_default=True, help="Seconds for one run.")
def run(
    places: Places,
    recipe: str,
    changes: tuple[str, ...],
    which: str,
    name: str | None,
    timeout: float,
) -> None:
    """Run, and write NAME.json and NAME.md to --out; results of earlier calls are kept."""
    places.create()
    chosen = recipes_index.with_text(recipes_index.load(recipe), changes)
    site, work, out, data = places
    if data is None:
        data = runs.prepare(work / "data" / "corpus", site, chosen.structure is not None)
    bench = Bench(chosen, changes, site, work, out, data, timeout)
    name = name or recipe
    result = {"runs": {}, **results.read(out, name), **runs.header(bench)}
    for each in which.split(","):
        tree = bench.tree("stock" if each.startswith("stock") else "overlay")
        rows = runs.trained(bench, each, tree, *_OPTIONS.get(each, ()))
        result["runs"][each] = {"out_of_memory": True} if rows is None else measured(rows)
        page = save(out, name, result)
    print(page)


@main.command()
@click.argument("result", type=FOLDER)
def plot(result: Path) -> None:
    """Draw the curves of a result into a PNG next to it."""
    print(draw(result))


if __name__ == "__main__":
    main()
