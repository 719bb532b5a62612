"""Pages or arguments in training: the NAM56R slice with and without them, in turns.

    python -m benchmarks.slices.turns SUBJECT --site SITE --work SCRATCH --out DIR [--only PART,...]

SUBJECT is what is measured: `indexer` or `attention`, the pages of these kernels; `earlier`, both;
`graphs`, CUDA graphs of everything in these layers that Megatron can capture; `sharing`, the same
with nine DSA layers, of which six share the keys of the others; or `arguments`, Megatron's own
arguments that `upstream_patches/NOT.md` names. Parts, on one GPU:

    fused8, fused2   the backend tilelang, sparse loss, micro-batch 8 and 2: tokens/s of the
                     overlay without the subject's pages ("before") and of all of it ("after")
    dense8           the same with the dense loss, micro-batch 8
    curves_dense     20 steps of Megatron's own path twice ("stock", "again"), and of the kernels
    curves_sparse    ("ours"), dense and sparse loss: whether ours is within the noise of the others
    graphs8, 2, 1    the fused slice without CUDA graphs ("before") and with them ("after")
    curves_graphs    50 steps without them, twice ("stock", "again"), and with them ("ours")
    curves_shared    the same with nine layers, also with Transformer Engine's graphs ("te")
    shared1          these nine layers without CUDA graphs ("before") and with them ("after")
    earlier8         the fused slice without the pages of the kernels ("before") and with them
    earlier2         ("after"), at micro-batch 2 also with CUDA graphs
    fp8_gather8      FP8 with bf16 parameters ("before") and with FP8 ones ("after")
    experts_wgrad8   the experts' weight gradients, immediate ("before") and delayed ("after")
    mla_down8        MLA's two down projections, separate ("before") and fused ("after")

Every run is a process; the sides of a part take turns (before, after, after, before), and the last
run of each side is profiled after its measured steps. After each run DIR/PART.json is written. A
run that it already contains is not repeated (except with `--again`), so the same command continues
a call that reached the end of --minutes. A run that fails ends its side, and not the others. At the
end, all parts are written as one .json and .md in DIR, and the slower run with all patches becomes
the result of the recipe that has its settings.

SITE holds a pristine `megatron/` with its dist-info, as pip or an unpacked wheel leave them; it is
copied into SCRATCH, where subjects must not share a folder, and never changed.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from benchmarks.harness import results
from benchmarks.harness import trees as sides
from benchmarks.slices import training as slice_training
from benchmarks.slices.report import WARM, graph_pools, headline, measured, steps_of, table
from benchmarks.slices.subjects import PARTS, SUBJECTS, Part, Subject
from benchmarks.slices.training import STARTS, Bench, environment, prepare
from benchmarks.slices.turns_report import of_side, report
from cppmega.recipe import index as recipes_index
from cppmega.runs.profile import SUMMARY

REFERENCE = (*STARTS, "dsa_indexer_loss_metric")
"""Patches of stock in the curves: to start, and to log the indexer loss in the same way."""
_PROFILED = 2
_FIRST_GUESS = 150.0
"""Seconds that a run is assumed to take until one has been measured."""


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
        """Run what is left of a part.

        Raises:
            ClickException: runs have failed; the next call repeats them.
        """
        target = self.bench.out / f"{name}.json"
        result = {} if self.again or not target.is_file() else json.loads(target.read_text())
        result = {**result, **self.facts, "part": name}
        runs = result.setdefault("runs", {})
        failed: dict[str, str] = {}
        for run, side, last in _runs(PARTS[name]):
            if run in runs or side in failed or _full(runs, side):
                continue
            left = self.deadline - time.monotonic()
            if left < 1.2 * max(self.taken, default=_FIRST_GUESS):
                print(f"{name} {run}: {left:.0f} s are left, it is not started", file=sys.stderr)
                break
            try:
                runs[run] = {"side": side, **self.run(name, run, side, last)}
            except click.ClickException as error:
                failed[side] = error.message
            else:
                target.write_text(json.dumps(result, indent=1) + "\n")
        if failed:
            raise click.ClickException("\n".join(failed.values()))

    def run(self, name: str, run: str, side: str, last: bool) -> dict[str, Any]:
        """One run, measured."""
        part, label = PARTS[name], f"{name}-{run}"
        self.bench.clear(label)
        self.bench.timeout = max(1.0, self.deadline - time.monotonic())
        started = time.monotonic()
        options = [*self.options(part, label, last), "--", *part.arguments]
        options += part.also.get(side, ())
        failure = ""
        try:
            self.bench.wait(label, self.bench.start(label, self.tree(side), *options))
        except MemoryError:
            return {"out_of_memory": True}
        except click.ClickException as error:
            # A run that ends with an error after its last step still has a curve.
            if not (part.is_curve and len(steps_of(self.bench.rows(label))) == self.length(part)):
                raise
            failure = _said(error.message)
        finally:
            self.taken.append(time.monotonic() - started)
        rows = self.bench.rows(label)
        if part.is_curve:
            return curve(rows, failure)
        found = measured(rows)
        found["seconds"] = [row["seconds"] for row in rows if _counts(row)]
        return found | ({"profile": f"{label}-profile"} if last else {})

    def options(self, part: Part, label: str, last: bool) -> Iterator[str]:
        """The trainer's options of a run."""
        # The profiler starts one step before the first profiled one.
        steps = self.length(part) + (1 + _PROFILED) * (last and not part.is_curve)
        batch = str(part.batch)
        changes = {"micro_batch_size": batch, "global_batch_size": batch, "train_iters": str(steps)}
        changes |= dict(part.fields)
        if part.linear:
            changes["cross_entropy_fusion_impl"] = "linear"
        for key, value in changes.items():
            yield from ("--set", f"{key}={value}")
        if last and not part.is_curve:
            yield from ("--profile", str(_PROFILED), "--profile-after", str(steps - _PROFILED))
            yield from ("--profile-folder", str(self.bench.out / f"{label}-profile"))

    def length(self, part: Part) -> int:
        """Steps of a run, without those that only a profile needs."""
        return (part.steps or self.curve_steps) if part.is_curve else WARM + self.steps

    def tree(self, side: str) -> Path:
        """A copy of the pristine megatron with a side's patches."""
        if side == "after" or not self.subject.pages:
            return self.bench.tree("after")
        # No other page may bend a curve that is compared with stock.
        ours = (*REFERENCE, *self.subject.curves)
        pages = {"stock": REFERENCE, "again": REFERENCE, "ours": ours}.get(side) or self._others()
        root = self.bench.work / "trees" / ("stock" if side == "again" else side)
        if not root.is_dir():
            sides.copy(self.bench.site, root)
        apply(root, pages)
        return root

    def _others(self) -> tuple[str, ...]:
        """What is applied in the whole overlay, but for the pages left out."""
        states = applied(self.bench.tree("after"))
        missing = [name for name in self.subject.pages if name not in states]
        if missing:
            raise click.ClickException(f"not applied, so there is no difference: {missing}")
        return tuple(name for name in states if name not in self.subject.pages)


def apply(root: Path, pages: Sequence[str]) -> None:
    """Apply these pages, and no others, to a tree."""
    only = [word for page in pages for word in ("--only", page)]
    command = [sys.executable, "-m", "cppmega.apply_patches", "--megatron", str(root), *only]
    subprocess.run(command, check=True, env=environment(), stdout=sys.stderr)


def applied(root: Path) -> tuple[str, ...]:
    """The pages that are in the code of a tree."""
    command = [sys.executable, "-m", "cppmega", "status", "--megatron", str(root), "--json"]
    done = subprocess.run(command, check=True, env=environment(), capture_output=True)
    patches = json.loads(done.stdout)["patches"]
    return tuple(one["name"] for one in patches if one["state"] in ("applied", "armed"))


def _runs(part: Part) -> Iterator[tuple[str, str, bool]]:
    """Name and side of each run, and whether it is the last one of its side."""
    for at, side in enumerate(part.turns):
        number = part.turns[: at + 1].count(side)
        yield f"{side}{number}", side, side not in part.turns[at + 1 :]


def _full(runs: dict[str, Any], side: str) -> bool:
    """Whether a side has run out of memory, which it would do again."""
    return any("out_of_memory" in run for run in runs.values() if run["side"] == side)


def _counts(row: dict[str, Any]) -> bool:
    return row.get("step", 0) > WARM and not row.get("profiled", False)


def curve(rows: list[dict[str, Any]], failure: str = "") -> dict[str, Any]:
    """The losses of a run, the speed of its second half, and how it failed after its last step."""
    steps = steps_of(rows)
    second_half = [row["tokens_per_second"] for row in steps[len(steps) // 2 :]]
    return {
        "losses": _losses(steps),
        "tokens_per_second": statistics.median(second_half),
        "peak_gib": max(row["peak_gib"] for row in steps),
        **graph_pools(steps),
        **({"failed": failure} if failure else {}),
    }


def _said(message: str) -> str:
    """The line of a failed run that says what happened (of our own errors, or else the last one),
    without the paths of a machine."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    line = next((line for line in lines if line.startswith("what:")), lines[-1])
    return re.sub(r" \(/[^)]*\)", "", line)


def _losses(steps: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Each logged loss by step, the gradient's norm among them."""
    found: dict[str, dict[int, float]] = {}
    for row in steps:
        for name, value in {**row["losses"], "grad norm": row["grad_norm"]}.items():
            found.setdefault(name, {})[row["step"]] = value
    return found


def profiles(out: Path, part: dict[str, Any]) -> dict[str, Path]:
    """The profile of each side of a part."""
    found = {
        run["side"]: out / run["profile"] / SUMMARY
        for run in part["runs"].values()
        if "profile" in run
    }
    return {side: file for side, file in found.items() if file.is_file()}


def write_report(out: Path, subject: Subject) -> str:
    """Write the report and the data of all parts that have a result, and the recipes' results."""
    parts = {
        name: json.loads((out / f"{name}.json").read_text())
        for name in subject.parts
        if (out / f"{name}.json").is_file()
    }
    text = report(subject, parts, {name: profiles(out, part) for name, part in parts.items()})
    (out / f"{subject.name}.md").write_text(text)
    short = {name: without_losses_by_step(part) for name, part in parts.items()}
    (out / f"{subject.name}.json").write_text(json.dumps(short, indent=1) + "\n")
    for name, part in parts.items():
        if PARTS[name].recipe and of_side(part, "after"):
            write_recipe(out, PARTS[name].recipe, subject, part)
    return text


def without_losses_by_step(part: dict[str, Any]) -> dict[str, Any]:
    """A part without the losses of each step, which only curves need."""
    runs = {
        name: {key: value for key, value in run.items() if key not in ("curve", "mtp")}
        for name, run in part["runs"].items()
    }
    return part | {"runs": runs}


def write_recipe(out: Path, recipe: str, subject: Subject, part: dict[str, Any]) -> None:
    """Write the slower run of all patches as `slices/training.py` writes a recipe's result."""
    slower = min(of_side(part, "after"), key=lambda run: run["tokens_per_second"])
    row = {key: value for key, value in slower.items() if key not in ("side", "profile")}
    result = part | {"recipe": recipe, "benchmark": subject.name, "runs": {"overlay": row}}
    del result["part"]
    result["headline"] = headline(result)
    (out / f"{recipe}.json").write_text(json.dumps(result, indent=1) + "\n")
    (out / f"{recipe}.md").write_text(table(result))


@click.command()
@click.argument("subject", type=click.Choice(tuple(SUBJECTS)))
@results.places("Prepared dataset [Python's own sources].", required=False)
@click.option("--only", help="Parts, in this order [all of the subject's].")
@click.option("--minutes", default=28.0, show_default=True, help="Time limit of this call.")
@click.option("--steps", default=12, show_default=True, help="Measured steps of a run.")
@click.option("--curve-steps", default=20, show_default=True, help="Steps of a curve.")
@click.option("--again", is_flag=True, help="Repeat the runs that have a result.")
def main(
    subject: str,
    site: Path,
    work: Path,
    out: Path,
    data: Path | None,
    only: str | None,
    minutes: float,
    steps: int,
    curve_steps: int,
    again: bool,
) -> None:
    """Run what is left of the parts, and print the report."""
    os.environ.update(SUBJECTS[subject].switches)  # trees and runs are made by other processes
    deadline = time.monotonic() + 60 * minutes
    parts = SUBJECTS[subject].parts
    chosen = only.split(",") if only else parts
    unknown = sorted(set(chosen) - set(parts))
    if unknown:
        raise click.BadParameter(f"{', '.join(unknown)}: the parts are {', '.join(parts)}")
    for folder in (work, out):
        folder.mkdir(parents=True, exist_ok=True)
    prefix = data or prepare(work / "data" / "corpus", (), site)
    recipe = recipes_index.load("nam56r_h200_slice")
    bench = Bench(recipe, (), site.resolve(), work.resolve(), out.resolve(), prefix.resolve(), 1.0)
    facts = {**slice_training.header(bench), "benchmark": "slice_turns"}
    turns = Turns(bench, SUBJECTS[subject], deadline, steps, curve_steps, again, facts=facts)
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
