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

from pathlib import Path

import click

from benchmarks.harness import results, runs
from benchmarks.harness.results import FOLDER, Places
from benchmarks.harness.runs import Bench
from benchmarks.slices import report
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
        result["runs"][each] = {"out_of_memory": True} if rows is None else report.measured(rows)
        page = report.save(out, name, result)
    print(page)


@main.command()
@click.argument("result", type=FOLDER)
def plot(result: Path) -> None:
    """Draw the curves of a result into a PNG next to it."""
    print(report.draw(result))


if __name__ == "__main__":
    main()
