"""Train a recipe on stock Megatron and with the overlay, one after the other on the same GPUs.

"Stock" is pristine except for the two patches without which it does not start from a wheel;
"linear" is the overlay with its linear cross-entropy turned on. The runs see the same data in the
same order from the same weights. "tilelang" is the overlay with the fused backend of DSA,
"stock-tilelang" is stock with it, which does not support NAM56R's widths. A further run is killed
and resumed, and its curve compared with that of the overlay, next to the difference between two
uninterrupted runs.

    python -m benchmarks.slices.training run --site SITE --work SCRATCH --out DIR
    python -m benchmarks.slices.training plot DIR/nam56r_h200_slice.json
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from benchmarks.harness import results, runs
from benchmarks.harness.results import FOLDER, Places
from benchmarks.harness.runs import Bench
from benchmarks.slices import report
from benchmarks.slices.report import END, KILL, SAVE, losses, measured
from cppmega.recipe import index as recipes_index

_TILELANG = ("dsa_kernel_backend=tilelang", "dsa_indexer_use_sparse_loss=True")
_OPTIONS = {
    "linear": ("--set", "cross_entropy_fusion_impl=linear"),
    "tilelang": tuple(word for change in _TILELANG for word in ("--set", change)),
    # As arguments, which come last: with the fields, the recipe would ask for the overlay's patch.
    "stock-tilelang": ("--", "--dsa-kernel-backend", "tilelang", "--dsa-indexer-use-sparse-loss"),
}


@click.group(help=__doc__)
def main() -> None:
    """Stock against overlay on a GPU."""


@main.command()
@results.places("Prepared dataset [made of --text].", required=False)
@click.option("--recipe", default="nam56r_h200_slice", show_default=True)
@click.option("--set", "changes", multiple=True, metavar="FIELD=VALUE", help="Change the recipe.")
@click.option("--text", type=FOLDER, multiple=True, help="Text to prepare [Python's own sources].")
@click.option(
    "--runs",
    "which",
    default="stock,overlay,resume",
    show_default=True,
    help="Which: these, linear, tilelang or stock-tilelang.",
)
@click.option("--name", help="Of the result's files [the recipe's].")
@click.option("--timeout", default=500.0, show_default=True, help="Seconds for one run.")
def run(
    places: Places,
    recipe: str,
    changes: tuple[str, ...],
    text: tuple[Path, ...],
    which: str,
    name: str | None,
    timeout: float,
) -> None:
    """Run, and write NAME.json and NAME.md to --out; results of earlier calls are kept."""
    places.create()
    chosen = recipes_index.with_text(recipes_index.load(recipe), changes)
    site, work, out, data = places
    if data is None:
        data = runs.prepare(work / "data" / "corpus", site, text, chosen.structure is not None)
    bench = Bench(chosen, changes, site, work, out, data, timeout)
    name = name or recipe
    result = {"runs": {}, **results.read(out, name), **runs.header(bench)}
    for each in which.split(","):
        if each == "resume":
            result["resume"] = resumed(bench)
        else:
            result["runs"][each] = trained(bench, each)
        page = report.save(out, name, result)
    print(page)


def trained(bench: Bench, name: str) -> dict[str, Any]:
    tree = bench.tree("stock" if name.startswith("stock") else "overlay")
    rows = runs.trained(bench, name, tree, *_OPTIONS.get(name, ()))
    return {"out_of_memory": True} if rows is None else measured(rows)


def resumed(bench: Bench) -> dict[str, Any]:
    """Kill a run without warning, resume it, and compare it with the uninterrupted one."""
    name, tree = "resume", bench.tree("overlay")
    checkpoints = bench.work / f"checkpoints-{datetime.now(UTC):%H%M%S}"  # never one that exists
    options = ["--save", str(checkpoints), "--save-interval", str(SAVE)]
    options += ["--exit-interval", str(END)]
    bench.clear(name)
    process = bench.start(name, tree, *options)
    bench.wait(name, process, until=KILL)
    runs.kill(process)
    killed = len(bench.rows(name))
    bench.wait(name, bench.start(name, tree, *options))
    rows, whole = bench.rows(name), bench.rows("overlay")
    return report.compared(losses(rows[:killed]), losses(rows[killed:]), losses(whole))


@main.command()
@click.argument("result", type=FOLDER)
def plot(result: Path) -> None:
    """Draw the curves of a result into a PNG next to it."""
    print(report.draw(result))


if __name__ == "__main__":
    main()
