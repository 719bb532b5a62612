"""Train slices with the overlay on two versions of Megatron, in turns: is the next one as fast?

    python -m benchmarks.slices.megatrons --site SITE --newer SITE --work SCRATCH --out DIR

Every run is a process. The versions take turns, the older first, and then in the other order. A
version is named by what its tree says, and a run that is in the result is not repeated. Writes
slice_megatrons_GPU.json and .md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from benchmarks.harness import results, runs
from benchmarks.harness.gpu import card
from benchmarks.harness.results import Places
from benchmarks.harness.runs import Bench
from benchmarks.slices.training import apart, curve, measured
from cppmega.overlay.verbs import Session
from cppmega.recipe import index as recipes_index

RECIPES = ("nam56r_h200_slice_whole", "nam56r_h200_slice_mhc")
TURNS = (0, 1, 1, 0)


def page(result: Mapping[str, Any]) -> str:
    """Rates of both versions, and how far their losses are apart."""
    return results.page(
        f"# The overlay on two versions of Megatron, {result['date']}",
        f"Written by `benchmarks/slices/megatrons.py`. {runs.on(result)} Every run has all patches "
        "that the version's tree takes. Rates are medians after the tenth step, in the order of "
        "the runs.",
        results.table(
            [
                *("recipe", "version", "tokens/s", ("of the older", ".3f"), ("peak, GiB", ".1f")),
                *(("first loss", ".4f"), ("last loss", ".4f")),
                ("largest difference of losses", ".4f"),
            ],
            _rows(result["recipes"]),
        ),
    )


def _rows(recipes: Mapping[str, Any]) -> Iterator[list[Any]]:
    for recipe, versions in recipes.items():
        first: list[dict[str, Any]] = []
        for version, of in versions.items():
            first = first or of
            rate, older = (sum(x["tokens_per_second"] for x in y) / len(y) for y in (of, first))
            yield [
                *(recipe, version, ", ".join(f"{x['tokens_per_second']:.0f}" for x in of)),
                *(rate / older, of[0]["peak_gib"], of[0]["first_loss"], of[0]["last_loss"]),
                apart(curve(of[0]), curve(first[0])) if of is not first else None,
            ]


@click.command(help=__doc__)
@results.places("Prepared dataset [Python's own sources].", required=False)
@results.folder_option("--newer", "Folder with the other megatron/.", required=True)
@click.option("--only", help="Recipes, in this order [all].")
@click.option("--steps", default=25, show_default=True, help="Steps of a run, ten to warm up.")
def main(places: Places, newer: Path, only: str | None, steps: int) -> None:
    places.create()
    sites = (places.site, newer.resolve())
    labels = [Session(site).read_tree().version for site in sites]
    for recipe in results.chosen(only, RECIPES, "recipes"):
        chosen = recipes_index.with_text(recipes_index.load(recipe), [f"train_iters={steps}"])
        structured = chosen.structure is not None
        name = "structured" if structured else "corpus"
        data = places.data or runs.prepare(places.work / "data" / name, places.site, structured)
        bench = Bench(chosen, (f"train_iters={steps}",), *places._replace(data=data), 400.0)
        facts = {**runs.header(bench), "benchmark": "slice_megatrons"}
        del facts["recipe"], facts["changes"], facts["data"], facts["stack"]["megatron-core"]
        target = f"slice_megatrons_{card(facts['stack']['gpu'])}"
        for turn, which in enumerate(TURNS):
            done = results.read(places.out, target).get("recipes", {}).get(recipe, {})
            seen = len(done.get(labels[which], []))
            if seen > TURNS[:turn].count(which):
                continue
            of = replace(bench, site=sites[which], work=places.work / str(which))
            rows = runs.trained(of, f"{recipe}-{which}-{seen}", of.tree("overlay"))
            if rows is None:
                raise click.ClickException(f"{recipe} does not fit on this GPU")
            with results.changing(places.out, target) as result:
                result.update(facts)
                every = result.setdefault("recipes", {}).setdefault(recipe, {})
                every.setdefault(labels[which], []).append(measured(rows))
                (places.out / f"{target}.md").write_text(page(result))


if __name__ == "__main__":
    main()
