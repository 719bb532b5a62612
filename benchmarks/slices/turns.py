"""Pages or arguments in training: the NAM56R slice with and without them, in turns.

    python -m benchmarks.slices.turns SUBJECT --site SITE --work SCRATCH --out DIR [--only PART,...]

SUBJECT is what is measured, and a PART its runs in one configuration: `SUBJECTS` and `PARTS`.
Every run is a process. The sides of a part take turns: without the subject's pages or arguments
("before"), with all of the overlay ("after"), and once more in the other order. The last run of
each side is profiled after its measured steps. Parts named `curves` run Megatron's own path twice
("stock", "again") and then ours, to see whether it is within the noise of the others.

After each run DIR/PART.json is written. A run that is in there is not repeated (`--again` does), so
the same command continues a call that reached the end of --minutes. A run that fails ends its side,
and not the others. At the end, all parts are written as one .json and .md in DIR, and the slower
run with all patches becomes the result of the recipe that has its settings.

SITE is copied into SCRATCH, where subjects must not share a folder, and never changed.
"""

from __future__ import annotations

import os
import re
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from benchmarks.harness import results, runs, trees
from benchmarks.harness.results import Places
from benchmarks.harness.runs import STARTS, Bench, Row
from benchmarks.slices import training as of_recipe
from benchmarks.slices.curves import FACTOR, verdict
from benchmarks.slices.training import GRAPH_POOLS, WARM, graph_pools, measured, steps_of
from cppmega.recipe import index as recipes_index
from cppmega.runs import json_file
from cppmega.runs import profile as run_profile
from cppmega.runs.profile import SUMMARY, Profile


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is compared."""

    title: str
    name: str
    """Of the files with the results."""
    pages: tuple[str, ...] = ()
    """Those that `before` lacks; empty: the sides differ only in their arguments."""
    curves: tuple[str, ...] = ()
    """The pages that `ours` has in addition to those of stock in the curves."""
    targets: Mapping[str, float] = field(default_factory=dict)
    """tokens/s of `after` over `before`, by part."""
    parts: tuple[str, ...]
    switches: Mapping[str, str] = field(default_factory=dict)
    """Variables of the environment in which patches are applied and runs are started."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Runs of one configuration."""

    batch: int
    arguments: tuple[str, ...] = ()
    """Megatron's own: as fields, they would make the recipe ask for the pages left out."""
    also: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Arguments of single sides."""
    fields: tuple[tuple[str, str], ...] = ()
    """Changes to the recipe, for settings that an argument would contradict."""
    turns: tuple[str, ...] = ("before", "after", "after", "before")
    steps: int | None = None
    """Steps of a curve; None: what the caller asks for."""
    linear: bool = True
    """The heads' losses without logits, which a micro-batch of 8 needs."""
    recipe: str = ""
    """The one that has these settings."""

    @property
    def is_curve(self) -> bool:
        return "stock" in self.turns


_KERNELS = ("fused8", "fused2", "dense8", "curves_dense", "curves_sparse")
_INDEXER = ("dsa_indexer_kernels", "dsa_indexer_prologue", "tilelang_indexer_parallel_store")
_ATTENTION = ("dsa_attention_kernels",)
SUBJECTS = {
    "indexer": Subject(
        title="The DSA indexer's kernels",
        name="dsa_indexer_slices_h200",
        pages=_INDEXER,
        curves=_INDEXER[:2],
        targets={"fused8": 1.25, "fused2": 1.4},
        parts=_KERNELS,
    ),
    "attention": Subject(
        title="The kernels of DSA's attention",
        name="dsa_attention_slices_h200",
        pages=_ATTENTION,
        curves=_ATTENTION,
        parts=_KERNELS,
    ),
    "graphs": Subject(
        title="CUDA graphs",
        name="dsa_graph_slices_h200",
        targets={"graphs2": 1.3, "graphs1": 1.3},
        parts=("graphs8", "graphs2", "graphs1", "curves_graphs"),
    ),
    "sharing": Subject(
        title="CUDA graphs of layers that share keys",
        name="dsa_sharing_graph_slices_h200",
        parts=("curves_shared", "shared1"),
        switches={"CPPMEGA_INDEX_CACHE": "1"},
    ),
}
_TILELANG = ("--dsa-kernel-backend", "tilelang")
_SPARSE = ("--dsa-indexer-use-sparse-loss",)
_FUSED = _TILELANG + _SPARSE
_GRAPHS = ("--cuda-graph-impl", "local", "--cuda-graph-modules", "attn", "moe_router")
_TE_GRAPHS = ("--cuda-graph-impl", "transformer_engine", *_GRAPHS[2:], "moe_preprocess")
_SHARED = (("pattern", "DDDE+DDDEDDDE/D-/D-"), ("dsa_index_pattern", "FSSFSSFSS"))
_CURVES = ("stock", "again", "ours")
_WITH_GRAPHS = {"after": _GRAPHS}


PARTS = {
    "fused8": Part(batch=8, arguments=_FUSED, recipe="nam56r_h200_slice_fused"),
    "fused2": Part(batch=2, arguments=_FUSED),
    "dense8": Part(batch=8, arguments=_TILELANG, recipe="nam56r_h200_slice_fused_dense"),
    "curves_dense": Part(batch=1, turns=_CURVES, linear=False),
    "curves_sparse": Part(batch=1, arguments=_SPARSE, turns=_CURVES, linear=False),
    **{f"graphs{n}": Part(batch=n, arguments=_FUSED, also=_WITH_GRAPHS) for n in (8, 2, 1)},
    "curves_graphs": Part(
        batch=1, arguments=_FUSED, also={"ours": _GRAPHS}, turns=_CURVES, steps=50
    ),
    "curves_shared": Part(
        batch=1,
        arguments=_FUSED,
        also={"ours": _GRAPHS, "te": _TE_GRAPHS},
        fields=_SHARED,
        turns=(*_CURVES, "te"),
        steps=50,
    ),
    "shared1": Part(batch=1, arguments=_FUSED, also=_WITH_GRAPHS, fields=_SHARED),
}


REFERENCE = (*STARTS, "dsa_indexer_loss_metric")
"""Patches of stock in the curves: to start, and to log the indexer loss in the same way."""
_PROFILED = 2
_FIRST_GUESS = 150.0
"""Seconds that a run is assumed to take until one has been measured."""
_REFERENCES = ("stock", "again")
DENSE = 0.9
"""tokens/s with the dense loss over those with the sparse one."""


@dataclass
class Turns:
    """One call: the runs that are left, as long as there is time."""

    bench: Bench
    subject: Subject
    deadline: float
    steps: int
    curve_steps: int
    again: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    taken: list[float] = field(default_factory=list)
    """Seconds of each run so far."""

    def part(self, name: str) -> None:
        """Run what is left of a part; ClickException if some failed, to be repeated."""
        result = {} if self.again else results.read(self.bench.out, name)
        result = {**result, **self.facts, "part": name}
        done = result.setdefault("runs", {})
        failed: dict[str, str] = {}
        for run, side, last in _runs(PARTS[name]):
            full = any("out_of_memory" in x for x in done.values() if x["side"] == side)
            if run in done or side in failed or full:  # it would run out of memory again
                continue
            left = self.deadline - time.monotonic()
            if left < 1.2 * max(self.taken, default=_FIRST_GUESS):
                print(f"{name} {run}: {left:.0f} s are left, it is not started", file=sys.stderr)
                break
            started = time.monotonic()
            try:
                done[run] = {"side": side, **self.run(name, run, side, last)}
            except click.ClickException as error:
                failed[side] = error.message
            else:
                results.save(self.bench.out, name, result)
            self.taken.append(time.monotonic() - started)
        if failed:
            raise click.ClickException("\n".join(failed.values()))

    def run(self, name: str, run: str, side: str, last: bool) -> dict[str, Any]:
        part, label, failure = PARTS[name], f"{name}-{run}", ""
        self.bench.timeout = max(1.0, self.deadline - time.monotonic())
        options = [*self.options(part, label, last), "--", *part.arguments]
        options += part.also.get(side, ())
        rows: list[Row] | None
        try:
            rows = runs.trained(self.bench, label, self.tree(side), *options)
        except click.ClickException as error:
            rows = self.bench.rows(label)
            # A run that ends with an error after its last step still has a curve.
            if not (part.is_curve and len(steps_of(rows)) == self.length(part)):
                raise
            failure = _said(error.message)
        if rows is None:
            return {"out_of_memory": True}
        if part.is_curve:
            return curve(rows, failure)
        warm = [row for row in steps_of(rows) if row["step"] > WARM]
        seconds = [row["seconds"] for row in warm if not row.get("profiled", False)]
        profile = {"profile": f"{label}-profile"} if last else {}
        return measured(rows) | {"seconds": seconds} | profile

    def options(self, part: Part, label: str, last: bool) -> Iterator[str]:
        # The profiler starts one step before the first profiled one.
        steps = self.length(part) + (1 + _PROFILED) * (last and not part.is_curve)
        batch = str(part.batch)
        changes = {"micro_batch_size": batch, "global_batch_size": batch, "train_iters": str(steps)}
        changes |= dict(part.fields)
        changes |= {"cross_entropy_fusion_impl": "linear"} if part.linear else {}
        for key, value in changes.items():
            yield from ("--set", f"{key}={value}")
        if last and not part.is_curve:
            folder = self.bench.out / f"{label}-profile"
            yield from runs.profiled(_PROFILED, steps - _PROFILED, folder)

    def length(self, part: Part) -> int:
        """Steps of a run, without those that only a profile needs."""
        return (part.steps or self.curve_steps) if part.is_curve else WARM + self.steps

    def tree(self, side: str) -> Path:
        if side == "after" or not self.subject.pages:
            return self.bench.tree("after")
        pages: tuple[str, ...] = REFERENCE
        if side == "ours":  # no other page may bend a curve that is compared with stock
            pages = (*REFERENCE, *self.subject.curves)
        elif side not in _REFERENCES:
            applied = trees.applied(self.bench.tree("after"))
            missing = {*self.subject.pages} - {*applied}
            if missing:
                raise click.ClickException(f"not applied, so there is no difference: {missing}")
            pages = tuple(name for name in applied if name not in self.subject.pages)
        root = self.bench.work / "trees" / ("stock" if side == "again" else side)
        return trees.made(self.bench.site, root, *trees.only(pages))


def _runs(part: Part) -> Iterator[tuple[str, str, bool]]:
    """Name and side of each run, and whether it is the last one of its side."""
    for at, side in enumerate(part.turns):
        number = part.turns[: at + 1].count(side)
        yield f"{side}{number}", side, side not in part.turns[at + 1 :]


def curve(rows: list[Row], failure: str = "") -> dict[str, Any]:
    """The losses of a run, the speed of its second half, and how it failed after its last step."""
    steps = steps_of(rows)
    losses: dict[str, dict[int, float]] = {}
    for row in steps:
        for name, value in {**row["losses"], "grad norm": row["grad_norm"]}.items():
            losses.setdefault(name, {})[row["step"]] = value
    second_half = [row["tokens_per_second"] for row in steps[len(steps) // 2 :]]
    return {
        "losses": losses,
        "tokens_per_second": statistics.median(second_half),
        "peak_gib": max(row["peak_gib"] for row in steps),
        **graph_pools(steps),
        **({"failed": failure} if failure else {}),
    }


def _said(message: str) -> str:
    """What happened, by the text of a failed run, without the paths of a machine."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    line = next((line for line in lines if line.startswith("what:")), lines[-1])
    return re.sub(r" \(/[^)]*\)", "", line)


def profiles(out: Path, part: dict[str, Any]) -> dict[str, Profile]:
    runs = [run for run in part["runs"].values() if "profile" in run]
    read = ((x["side"], json_file.read(out / x["profile"] / SUMMARY, Profile)) for x in runs)
    return {side: profile for side, profile in read if profile is not None}


def write_report(out: Path, subject: Subject) -> str:
    """Write the report and the data of all parts that have a result, and the recipes' results."""
    parts = {name: part for name in subject.parts if (part := results.read(out, name))}
    found = {name: profiles(out, part) for name, part in parts.items()}
    short = {}
    for name, part in parts.items():
        each = {label: of_recipe.without_curves(run) for label, run in part["runs"].items()}
        short[name] = part | {"runs": each}
        recipe, after = PARTS[name].recipe, of_side(part, "after")
        if recipe and after:  # the slower run, as `slices/training.py` writes a recipe's result
            slower = min(after, key=lambda run: run["tokens_per_second"])
            row = {key: value for key, value in slower.items() if key not in ("side", "profile")}
            facts = {key: value for key, value in part.items() if key != "part"}
            facts |= {"recipe": recipe, "benchmark": subject.name, "runs": {"overlay": row}}
            of_recipe.save(out, recipe, facts)
    return results.save(out, subject.name, short, report(subject, parts, found))


def report(
    subject: Subject,
    parts: Mapping[str, dict[str, Any]],
    profiles: Mapping[str, Mapping[str, Profile]],
) -> str:
    """The report as Markdown: ratios with their spread, profiles, and curves."""
    if not parts:
        return "There is no result yet.\n"
    first = next(iter(parts.values()))
    blocks: list[results.Page] = [
        f"# {subject.title} in the NAM56R slice, {first['date']}",
        f"{results.versions(first['stack'])}.",
    ]
    for name, part in parts.items():
        later = f", {part['date']}" if part["date"] != first["date"] else ""
        blocks.append(f"## {name}{later}")
        if name.startswith("curves"):
            blocks += _curves(part)
        else:
            blocks.append(_speed(part, subject.targets.get(name)))
            blocks += _profiles(profiles.get(name, {}))
    if "dense8" in parts and "fused8" in parts:
        found = ratio(speeds(parts["dense8"], "after"), speeds(parts["fused8"], "after"))
        what, missing = "tokens/s, dense over sparse loss", "Dense over sparse loss: no result."
        blocks.append(f"{what}: {_shown(found, DENSE)}" if found else missing)
    return results.page(*blocks)


def of_side(part: Mapping[str, Any], side: str) -> list[dict[str, Any]]:
    found = [run for run in part["runs"].values() if run["side"] == side]
    return [run for run in found if "out_of_memory" not in run]


def speeds(part: Mapping[str, Any], side: str) -> list[float]:
    return [run["tokens_per_second"] for run in of_side(part, side)]


def ratio(above: list[float], below: list[float]) -> tuple[float, float, float] | None:
    """The ratio of the medians, and the lowest and highest one of any two runs."""
    each = [a / b for a in above for b in below]
    if not each:
        return None
    return statistics.median(above) / statistics.median(below), min(each), max(each)


def _speed(part: Mapping[str, Any], target: float | None) -> Iterator[str]:
    pools = any("graph_pool_gib" in row for row in part["runs"].values())
    columns = ["run", "overlay", "step, ms", "lowest", "highest", "tokens/s", "peak memory, GiB"]
    rows = ([run, *_cells(row, pools)] for run, row in part["runs"].items())
    yield from results.table([*columns, *[GRAPH_POOLS] * pools], rows)
    found = ratio(speeds(part, "after"), speeds(part, "before"))
    yield ""
    if found is None:
        yield "No ratio: one of the sides has no result."
        return
    yield f"tokens/s, after over before: {_shown(found, target)}"
    peaks = [max(run["peak_gib"] for run in of_side(part, side)) for side in ("after", "before")]
    yield f"Peak memory: {peaks[0] - peaks[1]:+.2f} GiB."


def _cells(row: Mapping[str, Any], pools: bool) -> list[str]:
    reserved = [f"{row['graph_pool_gib']:.2f}" if "graph_pool_gib" in row else ""] * pools
    if "out_of_memory" in row:
        return ["", "out of memory", "", "", "", "", *reserved]
    steps = [1000 * second for second in row["seconds"]]
    times = [f"{time:.1f}" for time in (row["milliseconds"], min(steps), max(steps))]
    rate, peak = f"{row['tokens_per_second']:.0f}", f"{row['peak_gib']:.2f}"
    return [row["overlay"], *times, rate, peak, *reserved]


def _shown(found: tuple[float, float, float], target: float | None) -> str:
    shown = f"{found[0]:.3f} ({found[1]:.3f} to {found[2]:.3f})"
    if target is None:
        return f"{shown}."
    return f"{shown}; the target of {target} is {'met' if found[0] >= target else 'missed'}."


def _profiles(found: Mapping[str, Profile]) -> Iterator[str]:
    texts = {f"Profile, {side}:": run_profile.lines(profile) for side, profile in found.items()}
    if {"before", "after"} <= found.keys():
        both = run_profile.side_by_side(found["before"], found["after"])
        texts["A is before, B after:"] = both
    for title, lines in texts.items():
        yield from (title, "\n".join(("```", *lines, "```")))


def _curves(part: Mapping[str, Any]) -> Iterator[results.Page]:
    losses = {run["side"]: run["losses"] for run in part["runs"].values() if "losses" in run}
    sides = [side for side in losses if side not in _REFERENCES]
    if not sides or not losses.keys() >= set(_REFERENCES):
        yield "Not all curves have a result."
        return
    yield (
        "A curve is within the noise where it is not further from the nearer stock run than "
        f"{FACTOR:g} times the largest difference of the two stock runs."
    )
    for side in sides:
        columns = ["loss", "first", "last", "noise of two stock runs", f"{side} from stock"]
        rows = [
            [name, *_verdict(*(losses[x].get(name, {}) for x in (*_REFERENCES, side)))]
            for name in sorted(losses["stock"])
        ]
        yield results.table([*columns, "verdict"], rows)
    yield from _speed_of_curves(part)


def _speed_of_curves(part: Mapping[str, Any]) -> Iterator[str]:
    """What the runs of the curves also show, and which of them failed at their end."""
    each, failed = [], []
    for name, run in part["runs"].items():
        if "tokens_per_second" in run:
            pools = f", CUDA graphs {run['graph_pool_gib']:.1f}" if "graph_pool_gib" in run else ""
            each.append(f"{name} {run['tokens_per_second']:.0f} ({run['peak_gib']:.1f} GiB{pools})")
        if "failed" in run:
            failed.append(f"{name} failed after its last step: {run['failed']}")
    if each:
        what = "tokens/s, medians of the second half of each run (peak memory)"
        yield f"{what}: {', '.join(each)}."
    yield from failed


def _verdict(*curves: Mapping[Any, float]) -> list[str]:
    """First, last, noise, gap and verdict, from the values by step of stock, again, and ours."""
    stock, again, ours = ({int(step): x for step, x in curve.items()} for curve in curves)
    if not stock or stock.keys() != again.keys() or stock.keys() != ours.keys():
        return ["", "", "", "", "the runs have other steps"]
    one, other, own = ([of[step] for step in sorted(stock)] for of in (stock, again, ours))
    return [f"{one[0]:.5g}", f"{one[-1]:.5g}", *verdict(own, [one, other], rounding=0)]


@click.command(help=__doc__)
@click.argument("subject", type=click.Choice(tuple(SUBJECTS)))
@results.places("Prepared dataset [Python's own sources].", required=False)
@click.option("--only", help="Parts, in this order [all of the subject's].")
@click.option("--minutes", default=28.0, show_default=True, help="Time limit of this call.")
@click.option("--steps", default=12, show_default=True, help="Measured steps of a run.")
@click.option("--curve-steps", default=20, show_default=True, help="Steps of a curve.")
@click.option("--again", is_flag=True, help="Repeat the runs that have a result.")
def main(
    places: Places, subject: str, only: str | None, minutes: float, again: bool, **steps: int
) -> None:
    os.environ.update(SUBJECTS[subject].switches)  # trees and runs are made by other processes
    deadline = time.monotonic() + 60 * minutes
    chosen = results.chosen(only, SUBJECTS[subject].parts, "parts")
    places.create()
    site, work, out, data = places
    data = data or runs.prepare(work / "data" / "corpus", site)
    bench = Bench(recipes_index.load("nam56r_h200_slice"), (), site, work, out, data, 1.0)
    facts = {**runs.header(bench), "benchmark": "slice_turns"}
    turns = Turns(bench, SUBJECTS[subject], deadline, again=again, facts=facts, **steps)
    failed = False
    for name in chosen:
        try:
            turns.part(name)
        except click.ClickException as error:  # the other parts may still have their time
            failed = True
            print(f"{name}: {error.message}", file=sys.stderr)
    print(write_report(out, SUBJECTS[subject]))
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
