"""Train a whole recipe on this host: killed once without warning, resumed, and perhaps evaluated.

    python -m benchmarks.whole.training run --site SITE --work SCRATCH --out DIR \\
        --data TRAIN --held-out HELD
    python -m benchmarks.whole.training draw DIR/nam56r_h200_2gpu_ep2.json

TRAIN and HELD are datasets as `python -m cppmega.data.code.command` makes them; HELD is for a
recipe with eval_interval, and no other is evaluated. The run saves one checkpoint, is killed some
steps after it, and resumes from it: the steps in between are trained twice, and their losses
compared. Two steps before the kill are profiled, unless it comes too early for that. With --reload
RECIPE, that recipe loads the same checkpoint at the end, with other ranks for example, and trains
the steps after it once more, and so do all others that are given; the resumed part then saves
nothing, so that the checkpoint stays.
Writes NAME.json and NAME.md, and `draw` NAME.png. What can only fail is refused at once, as the
ranks would refuse it minutes later.

SITE holds a pristine `megatron/` with its dist-info, as pip or an unpacked wheel leave them; it is
copied and never changed. Everything else must be importable.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from benchmarks.harness import results
from benchmarks.slices import training as slice_training
from benchmarks.slices.report import headline
from benchmarks.slices.training import Bench, StoodStill, Stopped
from benchmarks.whole import checks as whole_checks
from benchmarks.whole import report as whole_report
from benchmarks.whole.checks import Course
from cppmega.checkpoints.tracker import TRACKER
from cppmega.data import corpus
from cppmega.recipe.run_options import RunOptions

NAME = "overlay"
CHECKPOINTS = "checkpoints"
_STEP = click.IntRange(1)


@click.group()
def main() -> None:
    """Train a whole recipe, killed once and resumed."""


@dataclass
class Part:
    """What one start of a run did."""

    rows: list[dict[str, Any]]
    first: float
    """Seconds from its start to the end of its first step."""
    said: str
    """Its log."""
    stopped: Stopped | None = None
    """Why it was stopped, if it did not end by itself and was not killed on purpose."""


def part(
    bench: Bench,
    tree: Path,
    options: RunOptions,
    kill_after: int | None = None,
    name: str = NAME,
) -> Part:
    """Start or resume the run; `kill_after`: kill it after this step, once its save is complete."""
    log, before = bench.out / f"{name}.log", len(bench.rows(name))
    read = log.stat().st_size if log.is_file() else 0
    started = time.monotonic()
    process = bench.start(name, tree, *options.words())
    bench.wait(name, process, until=1, after=before)
    first = time.monotonic() - started
    stopped = None
    try:
        bench.wait(name, process, kill_after, after=before)
    except Stopped as why:
        if kill_after is not None:
            raise  # there may be no checkpoint, and no step is trained twice
        stopped = why
    if kill_after is not None:
        assert options.save is not None
        kill_once_saved(bench, process, options.save / TRACKER)
    said = log.read_bytes()[read:].decode(errors="replace")
    return Part(bench.rows(name)[before:], first, said, stopped)


def kill_once_saved(bench: Bench, process: subprocess.Popen[bytes], saved: Path) -> None:
    """Kill the run once its checkpoint is complete, which an asynchronous save makes later.

    Raises:
        ClickException: the run has ended by itself.
        TimeIsUp: the checkpoint is not complete in time.
    """
    is_saved = bench.until(process, saved.is_file, "the checkpoint was not complete")
    if not is_saved or process.poll() is not None:
        raise click.ClickException(
            f"the run ended before it could be killed: train_iters={bench.recipe.train_iters} "
            "leaves too few steps after --kill-after"
        )
    slice_training.kill(process)


def reloading(bench: Bench, other: str) -> Bench:
    """The same run with another recipe.

    Its global batch and its length are those of the run, so that the steps have the same samples
    and learning rates. Nothing is evaluated.

    Raises:
        UsageError: it cannot load the run's checkpoint.
        CppmegaError: there is no such recipe, or it cannot be changed so.
    """
    batch, steps = bench.recipe.global_batch_size, bench.recipe.train_iters
    same = (f"global_batch_size={batch}", f"train_iters={steps}", "eval_interval=0")
    changes = (*bench.changes, *same)
    recipe = whole_checks.shipped(other, changes)
    whole_checks.check_layouts(bench.recipe, recipe)
    return replace(bench, recipe=recipe, changes=changes)


def reloaded(again: Bench, tree: Path, options: RunOptions, saved: int) -> dict[str, Any]:
    """Load the run's checkpoint with another recipe, and train some steps after it."""
    made = again.recipe
    name = f"reloaded-{made.name}"
    again.clear(name)
    done = part(again, tree, options, name=name)
    if isinstance(done.stopped, StoodStill):
        raise done.stopped
    facts = {"recipe": made.name, "gpus": made.gpus, "seconds_to_first_step": round(done.first, 1)}
    return {**facts, **whole_report.repeated(done.rows, again.rows(NAME), saved)}


@main.command()
@results.places("Prefix of the training data.")
@click.option(
    "--held-out",
    type=results.FOLDER,
    help="Prefix of the held-out data; needed, and used, only if the recipe has eval_interval.",
)
@click.option("--recipe", "recipe_name", default="nam56r_h200_2gpu_ep2", show_default=True)
@click.option("--set", "changes", multiple=True, metavar="FIELD=VALUE", help="Change the recipe.")
@click.option(
    "--save-after", type=_STEP, default=100, show_default=True, help="Step of the checkpoint."
)
@click.option(
    "--kill-after", type=_STEP, default=110, show_default=True, help="Step before the kill."
)
@click.option(
    "--profile-after",
    type=_STEP,
    help=f"Step before the {whole_checks.PROFILED} profiled ones, which precede the kill "
    f"[{whole_checks.PROFILE_AFTER}; no profile if the kill comes before its end].",
)
@click.option(
    "--reload",
    "others",
    multiple=True,
    metavar="RECIPE",
    help="Load the checkpoint with it at the end; repeatable.",
)
@click.option(
    "--reload-steps", type=_STEP, default=5, show_default=True, help="Steps that it trains."
)
@click.option(
    "--save-once",
    is_flag=True,
    help="The resumed part saves nothing, as with --reload; it would save at its end, too.",
)
@click.option("--name", help="Of the result's files [the recipe's].")
@click.option("--timeout", default=1500.0, show_default=True, help="Seconds for one part.")
def run(
    site: Path,
    work: Path,
    out: Path,
    data: Path,
    held_out: Path | None,
    recipe_name: str,
    changes: tuple[str, ...],
    save_after: int,
    kill_after: int,
    profile_after: int | None,
    others: tuple[str, ...],
    reload_steps: int,
    save_once: bool,
    name: str | None,
    timeout: float,
) -> None:
    """Train, kill, resume and report; --set train_iters=N says how long.

    What can only fail is refused before anything is started. What the resumed part has done until
    the time limit is reported, too; if it stood still, the command fails then.
    """
    with whole_checks.refusing():
        recipe = whole_checks.shipped(recipe_name, changes)
        reloads = reload_steps if others else 0
        course = whole_checks.course(recipe, save_after, kill_after, profile_after, reloads)
        folders = (site.resolve(), work.resolve(), out.resolve(), data.resolve())
        bench = Bench(recipe, changes, *folders, timeout)
        options = first_options(bench, course, held_out)
        again = [reloading(bench, other) for other in others]
        check(bench, options)
        for one in again:
            check(one, RunOptions())
    checkpoints = bench.work / CHECKPOINTS
    if checkpoints.exists():
        raise click.ClickException(f"{checkpoints} exists: a run would resume from it")
    for folder in (work, out):
        folder.mkdir(parents=True, exist_ok=True)
    facts = {
        **slice_training.header(bench),
        "benchmark": "whole_training",
        "held_out": held_out_facts(options),
    }
    bench.clear(NAME)
    tree = bench.tree(NAME)
    stopped, found = killed_and_resumed(bench, tree, options, course, others, save_once)
    result = facts | found
    result["headline"] = headline(result)
    target = out / f"{name or recipe.name}.json"
    write(target, result)
    loads = RunOptions(load=checkpoints, exit_interval=save_after + reload_steps)
    failed = [stopped.message] if isinstance(stopped, StoodStill) else []
    for one in again:
        try:
            reload = reloaded(one, tree, loads, save_after)
        except (click.ClickException, MemoryError) as error:  # the others can still be loaded
            failed.append(f"{one.recipe.name}: {error}")
        else:
            result.setdefault("reloads", []).append(reload)
            write(target, result)
    print(whole_report.page(result))
    if failed:
        raise click.ClickException("\n".join(failed))


def check(bench: Bench, options: RunOptions) -> None:
    """Check a start of the run.

    Raises:
        CppmegaError: its ranks would refuse it.
        ClickException: this host has too few GPUs.
    """
    data = (str(bench.data),)
    whole_checks.check_start(bench.recipe, replace(options, data=data), bench.site)
    whole_checks.check_gpus(bench.recipe)


def first_options(bench: Bench, course: Course, held_out: Path | None) -> RunOptions:
    """The options of the start that is killed, beside those that a bench gives to all."""
    evaluates = bench.recipe.eval_interval > 0  # else, the trainer refuses held-out data
    options = RunOptions(
        held_out=(str(held_out.resolve()),) if held_out is not None and evaluates else (),
        save=bench.work / CHECKPOINTS,
        save_interval=course.save_after,
    )
    if course.profile_after is None:
        return options
    return replace(
        options,
        profile=whole_checks.PROFILED,
        profile_after=course.profile_after,
        profile_folder=bench.out / "profile",
    )


def killed_and_resumed(
    bench: Bench,
    tree: Path,
    options: RunOptions,
    course: Course,
    others: Sequence[str],
    save_once: bool,
) -> tuple[Stopped | None, dict[str, Any]]:
    """The measurement of the run, whose checkpoint other recipes may load afterwards.

    Returns:
        Why the resumed part was stopped, if it was, and the measurement.
    """
    killed = part(bench, tree, options, course.kill_after)
    notes, again = [], replace(options, profile=None)
    why = why_unsaved(bench.work / CHECKPOINTS, others, save_once)
    if why:
        notes.append(f"The resumed part saved nothing: {why}.")
        again = replace(again, save=None, load=options.save)
    resumed = part(bench, tree, again)
    if resumed.stopped is not None:
        last = max((row.get("step", 0) for row in resumed.rows), default=0)
        why = resumed.stopped.message.partition(":")[0]
        notes.append(f"It was stopped after step {last} of {bench.recipe.train_iters}: {why}.")
    return resumed.stopped, {
        **whole_report.measured(killed.rows, resumed.rows, course.save_after),
        "seconds_to_first_step": [round(killed.first, 1), round(resumed.first, 1)],
        "saves": whole_report.saves(killed.said) + whole_report.saves(resumed.said),
        **({"note": " ".join(notes)} if notes else {}),
    }


def why_unsaved(checkpoints: Path, others: Sequence[str], save_once: bool) -> str:
    """Why the resumed part saves nothing; empty: it saves."""
    if others:
        return f"the checkpoint that it resumed from is loaded by {' and '.join(others)}"
    if save_once:
        return "it was started with `--save-once`"
    return "" if room_for_another(checkpoints) else "the disk had no room for a second checkpoint"


def write(target: Path, result: dict[str, Any]) -> None:
    """Write the result and its page."""
    target.write_text(json.dumps(result, indent=1) + "\n")
    target.with_suffix(".md").write_text(whole_report.page(result))


def room_for_another(checkpoints: Path) -> bool:
    """Whether the disk has room for a second checkpoint beside the first."""
    size = sum(each.stat().st_size for each in checkpoints.rglob("*") if each.is_file())
    return shutil.disk_usage(checkpoints).free > 1.1 * size


def held_out_facts(options: RunOptions) -> dict[str, Any] | None:
    """What the held-out data are; None in a run that does not evaluate."""
    if not options.held_out:
        return None
    found = corpus.open_(Path(options.held_out[0]))
    return {
        "fingerprint": found.card.fingerprint if found.card else "",
        "tokens": found.tokens,
        "documents": found.documents,
    }


@main.command()
@click.argument("result", type=results.FOLDER)
def draw(result: Path) -> None:
    """Draw the curves of a result into a PNG next to it."""
    print(whole_report.draw(result))


if __name__ == "__main__":
    main()
