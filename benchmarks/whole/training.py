"""Train a whole recipe on this host: killed once without warning, resumed, and perhaps evaluated.

\b
    python -m benchmarks.whole.training run --site SITE --work SCRATCH --out DIR \\
        --data TRAIN --held-out HELD
    python -m benchmarks.whole.training draw DIR/nam56r_h200_2gpu_ep2.json

TRAIN and HELD are datasets of `scripts/code_corpus.py`; HELD is for a recipe with eval_interval, as
no other is evaluated. The run saves one checkpoint, is killed some steps after it, and resumes from
it: the steps in between are trained twice, and their losses compared. Two steps before the kill are
profiled, unless it comes too early for that. With --reload RECIPE, that recipe loads the checkpoint
at the end, with other ranks for example, and trains the steps after it once more; the resumed part
then saves nothing. Writes NAME.json and NAME.md, and `draw` NAME.png. What can only fail is refused
at once, as the ranks would refuse it minutes later.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import click

from benchmarks.harness import results, runs
from benchmarks.harness.results import Places
from benchmarks.harness.runs import Bench, Row, StoodStill, Stopped
from benchmarks.slices.report import WARM, headline
from benchmarks.whole import report as whole_report
from cppmega.checkpoints.tracker import TRACKER
from cppmega.errors import CppmegaError
from cppmega.host.wording import counted
from cppmega.overlay.verbs import Session
from cppmega.recipe import Recipe
from cppmega.recipe import index as recipes_index
from cppmega.recipe.run_options import RunOptions
from cppmega.rules import starts
from cppmega.training import plan
from cppmega.training.requirements import Start

NAME = "overlay"
CHECKPOINTS = "checkpoints"
PROFILED, PROFILE_AFTER = 2, 40
"""Steps of the profile, and the one before it where the caller names none."""


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Let an error of cppmega end the command with its text instead of a traceback."""
    try:
        yield
    except CppmegaError as error:
        raise click.ClickException(error.render().removeprefix("error: ")) from None


@dataclass(frozen=True)
class Course:
    """The steps after which a run is saved, killed and, if at all, profiled."""

    save_after: int
    kill_after: int
    profile_after: int | None


def course(
    recipe: Recipe, save_after: int, kill_after: int, profile_after: int | None, reloaded: int
) -> Course:
    """The course of a run that can give a result; UsageError if it could only fail.

    `reloaded` are the steps that another recipe trains after the checkpoint, or 0.
    """
    last = recipe.train_iters
    profile = PROFILE_AFTER if profile_after is None else profile_after
    fits = profile + PROFILED <= kill_after
    disturbed = PROFILED + 1 if fits else 0  # the profiler disturbs the step before its own, too
    saves, kills = f"--save-after {save_after}", f"--kill-after {kill_after}"
    _refuse(save_after >= kill_after, f"{saves}, {kills}: there is no checkpoint to resume from.")
    _refuse(
        kill_after >= 2 * save_after,
        f"{saves}, {kills}: it saves at each multiple, and would resume from another checkpoint.",
    )
    _refuse(kill_after >= last, f"{kills}, train_iters={last}: it would end before it is killed.")
    _refuse(
        bool(reloaded) and save_after + reloaded > last,
        f"{saves}, --reload-steps {reloaded}, train_iters={last}: there are no losses to compare.",
    )
    _refuse(
        profile_after is not None and not fits,
        f"--profile-after {profile} must be at most {kill_after - PROFILED}, before the kill.",
    )
    _refuse(
        last <= WARM + disturbed,
        f"train_iters={last}: no step is left, as {WARM} warm up and the profile disturbs "
        f"{disturbed}.",
    )
    return Course(save_after, kill_after, profile if fits else None)


def _refuse(wrong: bool, why: str) -> None:
    if wrong:
        raise click.UsageError(why)


def shipped(name: str, changes: tuple[str, ...]) -> Recipe:
    """A shipped recipe, changed; not a file, as the ranks and the page know only the name."""
    _refuse(name.endswith(".py"), f"{name} is a file, and only shipped recipes are measured.")
    return recipes_index.with_text(recipes_index.load(name), changes)


LAYOUT = tuple(
    f"{kind}_parallel_size"
    for kind in ("tensor_model", "pipeline_model", "virtual_pipeline_model", "expert_model")
)


def check_layouts(saving: Recipe, loading: Recipe) -> None:
    """Refuse another layout where the optimizer's states are by bucket, which it cuts otherwise."""
    by_bucket = saving.use_distributed_optimizer and not saving.dist_ckpt_optim_fully_reshardable
    _refuse(
        by_bucket and any(getattr(saving, size) != getattr(loading, size) for size in LAYOUT),
        f"{loading.name} has another layout than {saving.name} and cannot load its checkpoint. "
        "--set dist_ckpt_optim_fully_reshardable=True saves one for every layout.",
    )


def check_start(recipe: Recipe, options: RunOptions, site: Path) -> None:
    Start(recipe, options).check(*starts.PROFILE)
    plan.check_files(recipe, options, Session(site))


def check_gpus(recipe: Recipe) -> None:
    import torch

    found = torch.cuda.device_count()
    if recipe.gpus > found:
        raise click.ClickException(
            f"Recipe {recipe.name} takes {counted(recipe.gpus, 'GPU')}, and this host has {found}."
        )


class Part(NamedTuple):
    """What one start of a run did."""

    rows: list[Row]
    first: float
    """Seconds from its start to the end of its first step."""
    log: str
    stopped: Stopped | None
    """Why it was stopped, if it did not end by itself and was not killed on purpose."""


def part(
    bench: Bench, tree: Path, options: RunOptions, kill_after: int | None = None, name: str = NAME
) -> Part:
    """Start or resume the run; `kill_after`: kill it after this step, once its save is complete."""
    log, before = bench.log(name), len(bench.rows(name))
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
    """Kill the run once its checkpoint is complete, which an asynchronous save makes later."""
    deadline = time.monotonic() + bench.timeout
    while not saved.is_file() and process.poll() is None:
        if time.monotonic() > deadline:
            runs.kill(process)
            why = f"the checkpoint was not complete after {bench.timeout:.0f} s more"
            raise runs.TimeIsUp(why)
        time.sleep(bench.period)
    if process.poll() is not None:
        raise click.ClickException(
            f"the run ended before it could be killed: train_iters={bench.recipe.train_iters} "
            "leaves too few steps after --kill-after"
        )
    runs.kill(process)


def reloading(bench: Bench, other: str) -> Bench:
    """The same steps, samples and learning rates with another recipe; nothing is evaluated."""
    same = (
        f"{name}={getattr(bench.recipe, name)}" for name in ("global_batch_size", "train_iters")
    )
    changes = (*bench.changes, *same, "eval_interval=0")
    recipe = shipped(other, changes)
    check_layouts(bench.recipe, recipe)
    return replace(bench, recipe=recipe, changes=changes)


def reloaded(again: Bench, tree: Path, options: RunOptions, saved: int) -> dict[str, Any]:
    """Load the run's checkpoint with another recipe, and train some steps after it."""
    name = f"reloaded-{again.recipe.name}"
    again.clear(name)
    done = part(again, tree, options, name=name)
    if isinstance(done.stopped, StoodStill):
        raise done.stopped
    return {
        "recipe": again.recipe.name,
        "gpus": again.recipe.gpus,
        "seconds_to_first_step": round(done.first, 1),
        **whole_report.repeated(done.rows, again.rows(NAME), saved),
    }


def first_options(bench: Bench, course: Course, held_out: Path | None) -> RunOptions:
    """The options of the start that is killed, beside those that a bench gives to all."""
    evaluates = bench.recipe.eval_interval > 0  # else, the trainer refuses held-out data
    held = (str(held_out.resolve()),) if held_out is not None and evaluates else ()
    saved = bench.work / CHECKPOINTS
    options = RunOptions(held_out=held, save=saved, save_interval=course.save_after)
    if course.profile_after is None:
        return options
    folder, after = bench.out / "profile", course.profile_after
    return replace(options, profile=PROFILED, profile_after=after, profile_folder=folder)


def killed_and_resumed(
    bench: Bench, tree: Path, options: RunOptions, course: Course, unsaved: str
) -> tuple[Stopped | None, dict[str, Any]]:
    """Why the resumed part was stopped, if it was, and the measurement of the run.

    `unsaved` says why that part shall save nothing; empty: it may save.
    """
    killed = part(bench, tree, options, course.kill_after)
    notes, again = [], replace(options, profile=None)
    if not unsaved and not room_for_another(bench.work / CHECKPOINTS):
        unsaved = "the disk had no room for a second checkpoint"
    if unsaved:
        notes.append(f"The resumed part saved nothing: {unsaved}.")
        again = replace(again, save=None, load=options.save)
    resumed = part(bench, tree, again)
    if resumed.stopped is not None:
        last = max((row.get("step", 0) for row in resumed.rows), default=0)
        why = resumed.stopped.message.partition(":")[0]
        notes.append(f"It was stopped after step {last} of {bench.recipe.train_iters}: {why}.")
    return resumed.stopped, {
        **whole_report.measured(killed.rows, resumed.rows, course.save_after),
        "seconds_to_first_step": [round(killed.first, 1), round(resumed.first, 1)],
        "saves": whole_report.saves(killed.log) + whole_report.saves(resumed.log),
        **({"note": " ".join(notes)} if notes else {}),
    }


def room_for_another(checkpoints: Path) -> bool:
    size = sum(each.stat().st_size for each in checkpoints.rglob("*") if each.is_file())
    return shutil.disk_usage(checkpoints).free > 1.1 * size


@click.group(help=__doc__)
def main() -> None:
    """Train a whole recipe, killed once and resumed."""


def _step(name: str, about: str, default: int | None = None) -> Any:
    return click.option(
        name, type=click.IntRange(1), default=default, show_default=bool(default), help=about
    )


@main.command()
@results.places("Prefix of the training data.")
@click.option("--held-out", type=results.FOLDER, help="Prefix of the held-out data.")
@click.option("--recipe", "recipe_name", default="nam56r_h200_2gpu_ep2", show_default=True)
@click.option("--set", "changes", multiple=True, metavar="FIELD=VALUE", help="Change the recipe.")
@_step("--save-after", "Step of the checkpoint.", 100)
@_step("--kill-after", "Step before the kill.", 110)
@_step("--profile-after", f"Step before the profile [{PROFILE_AFTER}, if that is early enough].")
@click.option("--reload", "others", multiple=True, help="Recipe that loads the checkpoint, too.")
@_step("--reload-steps", "Steps that it trains.", 5)
@click.option("--save-once", is_flag=True, help="The resumed part saves nothing.")
@click.option("--name", help="Of the result's files [the recipe's].")
@click.option("--timeout", default=1500.0, show_default=True, help="Seconds for one part.")
def run(
    places: Places,
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

    What the resumed part has done until the time limit is reported, too; if it stood still, the
    command then fails.
    """
    with refusing():
        recipe = shipped(recipe_name, changes)
        reloads = reload_steps if others else 0
        steps = course(recipe, save_after, kill_after, profile_after, reloads)
        bench = Bench(recipe, changes, *places, timeout)
        options = first_options(bench, steps, held_out)
        again = [reloading(bench, other) for other in others]
        for one, how in ((bench, options), *((one, RunOptions()) for one in again)):
            check_start(one.recipe, replace(how, data=(str(one.data),)), one.site)
            check_gpus(one.recipe)
    checkpoints = bench.work / CHECKPOINTS
    if checkpoints.exists():
        raise click.ClickException(f"{checkpoints} exists: a run would resume from it")
    places.create()
    held = runs.described(Path(options.held_out[0])) if options.held_out else None
    result = {**runs.header(bench), "benchmark": "whole_training", "held_out": held}
    bench.clear(NAME)
    tree = bench.tree(NAME)
    unsaved = "it was started with `--save-once`" if save_once else ""
    if others:
        unsaved = f"the checkpoint that it resumed from is loaded by {' and '.join(others)}"
    stopped, found = killed_and_resumed(bench, tree, options, steps, unsaved)
    result |= found
    result["headline"] = headline(result)
    name = name or recipe.name
    page = results.save(bench.out, name, result, whole_report.page(result))
    loads = RunOptions(load=checkpoints, exit_interval=save_after + reload_steps)
    failed = [stopped.message] if isinstance(stopped, StoodStill) else []
    for one in again:
        try:
            reload = reloaded(one, tree, loads, save_after)
        except (click.ClickException, MemoryError) as error:  # the others can still be loaded
            failed.append(f"{one.recipe.name}: {error}")
        else:
            result.setdefault("reloads", []).append(reload)
            page = results.save(bench.out, name, result, whole_report.page(result))
    print(page)
    if failed:
        raise click.ClickException("\n".join(failed))


@main.command()
@click.argument("result", type=results.FOLDER)
def draw(result: Path) -> None:
    """Draw the curves of a result into a PNG next to it."""
    print(whole_report.draw(result))


if __name__ == "__main__":
    main()
