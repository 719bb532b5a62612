"""What each part of NAM56R does to its losses: a small model with and without it, from three seeds.

\b
    python -m benchmarks.whole.parts --site SITE --work SCRATCH --out DIR \\
        --data TRAIN --held-out HELD

Every variant of `nam56r_small_cut` trains 500 steps from each seed on the same samples in the same
order, and is evaluated on the same held-out samples:

\b
    whole        the recipe as it is
    no_ngram     without the embedding of hashed n-grams
    no_structure without the embedding of structure ids
    shuffled     with the structure ids of other documents, in training and evaluation
    m_for_r      M2RNN layers replaced by Mamba-3
    mla_for_dsa  sparse attention replaced by full MLA

TRAIN and HELD are datasets with structure ids, as `scripts/code_corpus.py` makes them.
--jobs runs share the GPU, whose waits for the host are most of such a model's step, so their speeds
are not reported. After each run DIR/parts.json is written; a run that is in there is not repeated,
so a call that came to the end of --minutes is continued by the same command. Calls with other seeds
and another SCRATCH may run at the same time on other GPUs, and write to the same DIR. At the end
DIR/nam56r_parts_DEVICE.json, .md and .png are the result.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec
import numpy as np

from benchmarks.harness import results, runs
from benchmarks.harness.gpu import card
from benchmarks.harness.results import Places
from benchmarks.harness.runs import Bench, Row
from benchmarks.slices.report import refuse_mock_data
from cppmega.data import corpus
from cppmega.data.corpus import with_suffix
from cppmega.data.structure import COLUMN
from cppmega.host.markdown import table
from cppmega.recipe import arithmetic
from cppmega.recipe import index as recipes_index
from cppmega.runs import plotting

RECIPE = "nam56r_small_cut"
WHOLE = "whole"
HEADS = {"lm loss": "head", "mtp_1 loss": "MTP depth 1", "mtp_2 loss": "MTP depth 2"}


class Variant(NamedTuple):
    """A model that lacks a part, or has another in its place."""

    title: str
    changes: tuple[str, ...] = ()
    """Of the recipe, as `--set` takes them."""


VARIANTS = {
    WHOLE: Variant("the whole model"),
    "no_ngram": Variant("without n-gram hash", ("ngram_hash=None",)),
    "no_structure": Variant("without structure", ("structure=None",)),
    "shuffled": Variant("structure ids of other documents"),
    "m_for_r": Variant("Mamba-3 for M2RNN", ("pattern=+EMEDEMEDEMM/+-/+-",)),
    "mla_for_dsa": Variant("full MLA for DSA", ("pattern=+EME+EME+EMR/+-/+-",)),
}


@dataclass
class Parts:
    """The runs, and what of them is known."""

    bench: Bench
    tree: Path
    held_out: Path
    changes: tuple[str, ...]
    deadline: float

    def __post_init__(self) -> None:
        self._write = threading.Lock()

    @property
    def found(self) -> dict[str, Any]:
        """The curves so far, by variant and seed; those of other calls, too."""
        curves: dict[str, Any] = results.read(self.bench.out, "parts").get("runs", {})
        return curves

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
        rows = runs.trained(bench, run, self.tree, "--held-out", str(held_out))
        if rows is None:
            raise MemoryError(run)
        with results.changing(bench.out, "parts") as result:
            result.setdefault("runs", {})[run] = curve(rows)

    def copy(self, prefix: Path) -> Path:
        to = self.bench.work / "shuffled" / prefix.name
        with self._write:
            if not to.with_name(to.name + ".json").is_file():
                shuffled(prefix, to, seed=0)
        return to


def shuffled(prefix: Path, to: Path, seed: int) -> Path:
    """Copy a dataset to another prefix, with the ids of another document for every document.

    Ids of a document that is shorter than the one that gets them are repeated from their start.

    Args:
        prefix: a dataset with structure ids, one sequence per document.
        to: prefix of the copy; its folder is created.
        seed: of the order of documents.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    found = corpus.open_(prefix)
    assert found.card is not None and found.card.structure is not None, "no structure ids"
    documents = IndexedDataset(str(with_suffix(prefix, COLUMN)))
    order = np.random.default_rng(seed).permutation(len(documents))
    others = dict(zip(order.tolist(), np.roll(order, 1).tolist(), strict=True))  # never its own
    given = [
        np.resize(documents[others[at]], length)
        for at, length in enumerate(documents.sequence_lengths)
    ]

    to.parent.mkdir(parents=True, exist_ok=True)
    for suffix in (".bin", ".idx", f"{COLUMN}.idx"):
        shutil.copyfile(with_suffix(prefix, suffix), with_suffix(to, suffix))
    ids = np.concatenate(given).tobytes()
    with_suffix(to, f"{COLUMN}.bin").write_bytes(ids)
    record = msgspec.structs.replace(
        found.card.structure, bin_sha256=hashlib.sha256(ids).hexdigest()
    )
    card = msgspec.structs.replace(found.card, structure=record)
    with_suffix(to, ".json").write_text(card.dump())
    return to


def curve(rows: list[Row]) -> dict[str, Any]:
    """The held-out losses of a run by step, and the overlay it was trained with.

    Raises:
        ClickException: it saw mock data, or a loss is not finite, or it was never evaluated.
    """
    refuse_mock_data(rows)
    start = next(row for row in rows if "start" in row)
    held_out = {str(row["evaluated"]): row["losses"] for row in rows if "evaluated" in row}
    values = [losses[name] for losses in held_out.values() for name in HEADS]
    if not values or not all(map(math.isfinite, values)):
        raise click.ClickException(f"held-out losses of {start['start']}: {held_out}")
    return {"overlay": start["overlay"], "held_out": held_out}


def report(result: Mapping[str, Any]) -> str:
    """Held-out losses of every variant, and their differences from those of the whole model."""
    data = result["data"]
    last = {  # the losses of the last evaluation, by seed
        name: {seed: curve[max(curve)] for seed, curve in _curves(result, name).items()}
        for name in VARIANTS
    }
    losses, worse = [], []
    for name, variant in VARIANTS.items():
        if own := last[name]:
            means = [_spread([each[loss] for each in own.values()]) for loss in HEADS]
            losses.append([variant.title, _millions(variant), str(len(own)), *means])
        both = [seed for seed in own if seed in last[WHOLE]]
        if name != WHOLE and both:
            less = [[own[seed][loss] - last[WHOLE][seed][loss] for seed in both] for loss in HEADS]
            worse.append([variant.title, *map(_spread, less), _verdict(less[0])])
    missing = [variant.title for name, variant in VARIANTS.items() if not last[name]]
    titles = list(HEADS.values())
    return results.page(
        f"# What the parts of NAM56R do, {result['date']}",
        f"{result['recipe']}, {results.versions(result['stack'])}. Data {data['fingerprint']}: "
        f"{data['documents']} documents, {data['tokens']} tokens. Losses of held-out samples after "
        "the last step, in nats a token.",
        table(["variant", "parameters, million", "seeds", *titles], losses),
        "Mean, and in parentheses the lowest and the highest of the seeds.",
        table(["variant", *titles, "the head's loss"], worse) if worse else "",
        "The variant's loss less the whole model's, seed by seed: both see the same samples in "
        "the same order. A difference counts if it has one sign with every seed, and its mean "
        "is twice its standard error or more; fewer than three seeds cannot tell."
        if worse
        else "",
        f"Not run: {', '.join(missing)}." if missing else "",
    )


def _verdict(worse: list[float]) -> str:
    if len(worse) < 3:
        return "too few seeds"
    mean, error = statistics.mean(worse), statistics.stdev(worse) / math.sqrt(len(worse))
    if min(worse) * max(worse) <= 0 or abs(mean) < 2 * error:
        return "no measurable difference"
    return "higher" if mean > 0 else "lower"


def _spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.4f} ({min(values):.4f} to {max(values):.4f})"


def _curves(result: Mapping[str, Any], variant: str) -> dict[int, dict[int, dict[str, float]]]:
    """The held-out losses of a variant by seed and step."""
    found = {}
    for run, each in result["runs"].items():
        name, _, seed = run.rpartition("-")
        if name == variant:
            held_out = each["held_out"]
            found[int(seed)] = {step: held_out[str(step)] for step in sorted(map(int, held_out))}
    return dict(sorted(found.items()))


def _millions(variant: Variant) -> str:
    recipe = recipes_index.with_text(recipes_index.load(RECIPE), variant.changes)
    return f"{arithmetic.parameters(recipe).total / 1e6:.1f}"


def draw(result: Mapping[str, Any], target: Path) -> None:
    """Draw the head's held-out losses, and how far they are from the whole model's."""
    head = {
        name: {
            seed: {step: losses["lm loss"] for step, losses in curve.items()}
            for seed, curve in _curves(result, name).items()
        }
        for name in VARIANTS
    }
    with results.drawing(target, 1, 2) as ((left, right),):
        for colour, (name, own) in zip(plotting.COLOURS, head.items(), strict=False):
            if not own:
                continue
            steps, values = _by_step(own.values())
            means = list(map(statistics.mean, values))
            left.plot(steps, means, color=colour, label=VARIANTS[name].title)
            steps, values = _by_step(
                {step: own[seed][step] - of[step] for step in own[seed].keys() & of.keys()}
                for seed, of in head[WHOLE].items()
                if seed in own
            )
            if name != WHOLE and steps:
                right.plot(steps, list(map(statistics.mean, values)), color=colour)
                band = list(map(min, values)), list(map(max, values))
                right.fill_between(steps, *band, color=colour, alpha=0.2, linewidth=0)
        right.axhline(0, color="black", linewidth=0.8)
        left.set(xlabel="step", ylabel="held-out loss, nats", title="head, mean of the seeds")
        right.set(xlabel="step", title="difference from the whole model (band: all seeds)")
        left.legend()


def _by_step(curves: Iterable[dict[int, float]]) -> tuple[list[int], list[list[float]]]:
    """The steps that all curves have, and the values of all at each."""
    every = list(curves)
    steps = sorted(set.intersection(*map(set, every))) if every else []
    return steps, [[each[step] for each in every] for step in steps]


@click.command(help=__doc__)
@results.places("Prefix of the training data.")
@click.option("--held-out", type=results.FOLDER, required=True, help="Prefix of the held-out data.")
@click.option("--seeds", default="1,2,3", show_default=True)
@click.option("--jobs", default=3, show_default=True, help="Runs at a time.")
@click.option("--minutes", default=28.0, show_default=True, help="Time limit of this call.")
@click.option("--set", "changes", multiple=True, metavar="FIELD=VALUE", help="Change the recipe.")
def main(
    places: Places, held_out: Path, seeds: str, jobs: int, minutes: float, changes: tuple[str, ...]
) -> None:
    deadline = time.monotonic() + 60 * minutes
    places.create()
    bench = Bench(recipes_index.load(RECIPE), changes, *places, 1.0)
    parts = Parts(bench, bench.tree("overlay"), held_out.resolve(), changes, deadline)
    # A seed of every variant before the next seed.
    every = [(name, int(seed)) for seed in seeds.split(",") for name in VARIANTS]
    done = parts.found
    left = [(name, seed) for name, seed in every if f"{name}-{seed}" not in done]
    with ThreadPoolExecutor(jobs) as pool:
        ended = [pool.submit(parts.run, *each) for each in left]
    failed = [error for each in ended if (error := each.exception()) is not None]
    for error in failed:
        print(error, file=sys.stderr)
    result = {**runs.header(bench), "benchmark": "parts", "held_out": held_out.name}
    result["runs"] = parts.found
    name = f"nam56r_parts_{card(result['stack']['gpu'])}"
    results.write(places.out, name, result, report(result))
    if result["runs"]:
        draw(result, places.out / f"{name}.png")
    sys.exit(int(bool(failed)))


if __name__ == "__main__":
    main()
