"""What each part of NAM56R does to its losses: a small model with and without it, from three seeds.

    python -m benchmarks.whole.parts --site SITE --work SCRATCH --out DIR \\
        --data TRAIN --held-out HELD

Every variant of `nam56r_small_cut` trains 500 steps from each seed on the same samples in the same
order, and is evaluated on the same held-out samples:

    whole        the recipe as it is
    no_ngram     without the embedding of hashed n-grams
    no_structure without the embedding of structure ids
    shuffled     with the structure ids of other documents, in training and evaluation
    m_for_r      M2RNN layers replaced by Mamba-3
    mla_for_dsa  sparse attention replaced by full MLA

TRAIN and HELD are datasets with structure ids, as `python -m cppmega.data.code.command` makes them.
--jobs runs share the GPU, whose waits for the host are most of such a model's step, so their speeds
are not reported. After each run DIR/parts.json is written; a run that is in there is not repeated,
so a call that came to the end of --minutes is continued by the same command. Calls with other seeds
and another SCRATCH may run at the same time on other GPUs, and write to the same DIR. At the end
DIR/nam56r_parts_DEVICE.json, .md and .png are the result.

SITE holds a pristine `megatron/` with its dist-info, as pip or an unpacked wheel leave them; it is
copied and never changed.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.harness import results
from benchmarks.harness.gpu import card
from benchmarks.slices import training as slice_training
from benchmarks.slices.training import Bench
from benchmarks.whole.parts_report import RECIPE, VARIANTS, curve, draw, report
from benchmarks.whole.shuffled_structure import shuffled
from cppmega.recipe import index as recipes_index


@dataclass
class Parts:
    """The runs, and what of them is known."""

    bench: Bench
    tree: Path
    held_out: Path
    changes: tuple[str, ...]
    deadline: float
    found: Path

    def __post_init__(self) -> None:
        self._write = threading.Lock()

    @property
    def runs(self) -> dict[str, Any]:
        """The curves so far, by variant and seed; those of other calls, too."""
        runs: dict[str, Any] = results.shared(self.found, "runs")["runs"]
        return runs

    def left(self, seeds: Sequence[int]) -> list[tuple[str, int]]:
        """The runs without a result, a seed of every variant before the next seed."""
        every = [(name, seed) for seed in seeds for name in VARIANTS]
        runs = self.runs
        return [(name, seed) for name, seed in every if f"{name}-{seed}" not in runs]

    def run(self, name: str, seed: int) -> None:
        """Train one variant from one seed, if there is time, and keep its curve."""
        if time.monotonic() > self.deadline:
            return
        changes = (*VARIANTS[name].changes, f"seed={seed}", *self.changes)
        train, held_out = self.bench.data, self.held_out
        if name == "shuffled":
            train, held_out = (self.copy(prefix) for prefix in (train, held_out))
        bench = Bench(
            recipes_index.with_text(self.bench.recipe, changes),
            changes,
            *(self.bench.site, self.bench.work, self.bench.out, train),
            max(self.deadline - time.monotonic(), 1.0),
        )
        run = f"{name}-{seed}"
        bench.clear(run)
        bench.wait(run, bench.start(run, self.tree, "--held-out", str(held_out)))
        found = curve(bench.rows(run))
        with results.changing(self.found, "runs") as result:
            result["runs"][run] = found

    def copy(self, prefix: Path) -> Path:
        """The dataset with the structure ids of other documents, made once."""
        to = self.bench.work / "shuffled" / prefix.name
        with self._write:
            if not to.with_name(to.name + ".json").is_file():
                shuffled(prefix, to, seed=0)
        return to


@click.command()
@results.places("Prefix of the training data.")
@click.option("--held-out", type=results.FOLDER, required=True, help="Prefix of the held-out data.")
@click.option("--seeds", default="1,2,3", show_default=True)
@click.option("--jobs", default=3, show_default=True, help="Runs at a time.")
@click.option("--minutes", default=28.0, show_default=True, help="Time limit of this call.")
@click.option("--set", "changes", multiple=True, metavar="FIELD=VALUE", help="Change the recipe.")
def main(
    site: Path,
    work: Path,
    out: Path,
    data: Path,
    held_out: Path,
    seeds: str,
    jobs: int,
    minutes: float,
    changes: tuple[str, ...],
) -> None:
    """Run what is left of the variants, and write the report of those that are complete."""
    deadline = time.monotonic() + 60 * minutes
    for folder in (work, out):
        folder.mkdir(parents=True, exist_ok=True)
    recipe = recipes_index.load(RECIPE)
    bench = Bench(
        recipe, changes, site.resolve(), work.resolve(), out.resolve(), data.resolve(), 1.0
    )
    tree = bench.tree("overlay")
    parts = Parts(bench, tree, held_out.resolve(), changes, deadline, out / "parts.json")
    left = parts.left([int(seed) for seed in seeds.split(",")])
    with ThreadPoolExecutor(jobs) as pool:
        ended = [pool.submit(parts.run, *each) for each in left]
    failed = [error for each in ended if (error := each.exception()) is not None]
    for error in failed:
        print(error, file=sys.stderr)
    facts = {**slice_training.header(bench), "benchmark": "parts", "held_out": held_out.name}
    result = {**facts, "runs": parts.runs}
    device = card(result["stack"]["gpu"])
    target = out / f"nam56r_parts_{device}.json"
    target.write_text(json.dumps(result, indent=1) + "\n")
    target.with_suffix(".md").write_text(report(result))
    if result["runs"]:
        draw(result, target.with_suffix(".png"))
    print(report(result))
    sys.exit(int(bool(failed)))


if __name__ == "__main__":
    main()
