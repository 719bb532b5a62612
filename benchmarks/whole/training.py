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

import json
import math
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click

from benchmarks.harness import results, runs
from benchmarks.harness.results import Places
from benchmarks.harness.runs import Bench, Row, StoodStill, Stopped
from benchmarks.slices import training as slice_report
from benchmarks.slices.training import WARM, apart, headline, losses, steps_of, title
from cppmega.checkpoints.tracker import TRACKER
from cppmega.errors import CppmegaError
from cppmega.host.wording import counted
from cppmega.overlay.verbs import Session
from cppmega.recipe import Recipe
from cppmega.recipe import index as recipes_index
from cppmega.recipe.run_options import RunOptions
from cppmega.training import plan
from cppmega.training.requirements import Start
from cppmega.training.step import untrained_loss
from tools.markdown import table

NAME = "overlay"
CHECKPOINTS = "checkpoints"
PROFILED, PROFILE_AFTER = 2, 40
"""Steps of the profile, and the one before it where the caller names none."""


def checked(
    recipe: Recipe, save_after: int, kill_after: int, profile_after: int | None, reloaded: int
) -> int | None:
    """The step before the profile, if there is one; UsageError if the run could only fail.

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
    return profile if fits else None


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
    Start(recipe, options).check("the profiler")
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
        **repeated(done.rows, again.rows(NAME), saved),
    }


def first_options(
    bench: Bench, save_after: int, profile_after: int | None, held_out: Path | None
) -> RunOptions:
    """The options of the start that is killed, beside those that a bench gives to all."""
    evaluates = bench.recipe.eval_interval > 0  # else, the trainer refuses held-out data
    held = (str(held_out.resolve()),) if held_out is not None and evaluates else ()
    saved = bench.work / CHECKPOINTS
    options = RunOptions(held_out=held, save=saved, save_interval=save_after)
    if profile_after is None:
        return options
    folder = bench.out / "profile"
    return replace(options, profile=PROFILED, profile_after=profile_after, profile_folder=folder)


def killed_and_resumed(
    bench: Bench, tree: Path, options: RunOptions, kill_after: int, unsaved: str
) -> tuple[Stopped | None, dict[str, Any]]:
    """Why the resumed part was stopped, if it was, and the measurement of the run.

    `unsaved` says why that part shall save nothing; empty: it may save.
    """
    killed = part(bench, tree, options, kill_after)
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
        **measured(killed.rows, resumed.rows, options.save_interval),
        "seconds_to_first_step": [round(killed.first, 1), round(resumed.first, 1)],
        "saves": saves(killed.log) + saves(resumed.log),
        **({"note": " ".join(notes)} if notes else {}),
    }


def room_for_another(checkpoints: Path) -> bool:
    size = sum(each.stat().st_size for each in checkpoints.rglob("*") if each.is_file())
    return shutil.disk_usage(checkpoints).free > 1.1 * size


_SAVE = re.compile(r"^cppmega: (checkpoint of step .*)$", re.MULTILINE)


def measured(killed: list[Row], resumed: list[Row], saved: int) -> dict[str, Any]:
    """The run without the steps that were lost, and how those compare with their repetition."""
    lost, again = losses(killed), losses(resumed)
    if not again:
        raise click.ClickException("the resumed part took no step: the kill came too late")
    if min(again) != saved + 1:
        raise click.ClickException(f"resumed at {min(again)}, the checkpoint was of step {saved}")
    rows = [row for row in killed if row.get("step", 0) <= saved] + steps_of(resumed)
    steps = steps_of(rows)
    if [row["step"] for row in steps] != list(range(1, len(steps) + 1)):
        raise click.ClickException("a step is missing")
    evaluated = {row["evaluated"]: row for row in killed + resumed if "evaluated" in row}
    both = sorted(set(lost) & set(again))
    return {
        "runs": {"overlay": {**slice_report.measured(rows), **curves(steps)}},
        "resume": {
            "killed_after_step": max(lost),
            "resumed_from_step": saved,
            "repeated_steps": [both[0], both[-1]],
            "largest_difference": apart(again, lost),
            "first_difference": abs(again[both[0]] - lost[both[0]]),
            "loss_span": max(again.values()) - min(again.values()),
        },
        "held_out_losses": [
            [step, row["losses"], row["tokens"], round(row["seconds"], 1)]
            for step, row in sorted(evaluated.items())
        ],
    }


def repeated(rows: list[Row], whole: list[Row], saved: int) -> dict[str, Any]:
    """Steps that another recipe trained from a checkpoint, and the run's own losses of them.

    They are too few for a median: the seconds of each are kept.
    """
    again, own = losses(rows), losses(whole)
    if min(again, default=0) != saved + 1:
        raise click.ClickException(f"began at {min(again, default=0)}, not after step {saved}")
    steps = steps_of(rows)
    return {
        "from_step": saved,
        "losses": [[step, loss, own.get(step)] for step, loss in sorted(again.items())],
        "largest_difference": apart(again, own),
        "seconds": [round(row["seconds"], 3) for row in steps],
        "peak_gib": round(max(row["peak_gib"] for row in steps), 2),
    }


def curves(steps: list[Row]) -> dict[str, Any]:
    names, loads = steps[0]["losses"], (row.get("expert_load") for row in steps)
    return {
        "losses": {n: [float(f"{row['losses'][n]:.6g}") for row in steps] for n in names},
        "expert_load": [load_of(layers) for layers in loads if layers],
    }


def load_of(layers: list[list[float]]) -> list[float]:
    """The least load of an expert, the medians over layers of least and most, and the most."""
    least, most = (sorted(each) for each in zip(*layers, strict=True))
    middle = len(least) // 2
    return [least[0], least[middle], most[middle], most[-1]]


def saves(log: str) -> list[str]:
    return list(dict.fromkeys(_SAVE.findall(log)))


def heads_of(run: dict[str, Any]) -> list[str]:
    return [name for name in run["losses"] if name == "lm loss" or name.startswith("mtp")]


def page(result: dict[str, Any]) -> str:
    run, resume, data = result["runs"]["overlay"], result["resume"], result["data"]
    held, evaluated = result["held_out"], result["held_out_losses"]
    held_out = f"; held out {held['fingerprint']}: {held['documents']:,} documents" if held else ""
    heads = heads_of(run)
    at_first = ""  # which earlier results do not have
    if "first_difference" in resume:
        at_first = f", in the first of them by {resume['first_difference']:.2e}"
    columns = ["after step", *heads, "tokens", "seconds"]
    rows = (
        [str(step), *(f"{found[name]:.4f}" for name in heads), f"{tokens:,}", f"{took:.1f}"]
        for step, found, tokens, took in evaluated
    )
    return results.page(
        title(result),
        f"Written by `benchmarks/whole_training.py`. {runs.on(result)} "
        "Median of the steps after the tenth that were not profiled.",
        f"Data {data['fingerprint']}: {data['documents']:,} documents, {data['tokens']:,} tokens"
        f"{held_out}.",
        table(["", ""], _rows(result, run, heads)),
        f"Killed with SIGKILL after step {resume['killed_after_step']} and resumed from the "
        f"checkpoint of step {resume['resumed_from_step']}: over steps "
        f"{resume['repeated_steps'][0]} to {resume['repeated_steps'][1]}, trained before and after "
        f"the kill, the losses differ by at most {resume['largest_difference']:.2e}{at_first}.",
        (f"- {each}" for each in result["saves"]),
        *map(_reloaded, result.get("reloads", ())),
        result.get("note", ""),
        "## Held-out losses, nats per token" if evaluated else "Nothing was evaluated.",
        table(columns, rows) if evaluated else "",
    )


def _rows(result: dict[str, Any], run: dict[str, Any], heads: list[str]) -> Iterator[list[str]]:
    recipe = recipes_index.with_text(recipes_index.load(result["recipe"]), result["changes"])
    uniform, expected = math.log(recipe.padded_vocab_size), untrained_loss(recipe)
    first, last = (
        ", ".join(f"{name} {run['losses'][name][at]:.3f}" for name in heads) for at in (0, -1)
    )
    farthest = max(abs(run["losses"][name][0] / expected - 1) for name in heads)
    random = f"random weights are expected to have {expected:.3f} (ln V = {uniform:.3f})"
    yield ["overlay digest", str(run["overlay"])]
    yield ["steps", str(run["steps"])]
    yield ["step, ms", f"{run['milliseconds']:.1f}"]
    yield ["tokens/s per GPU", f"{run['tokens_per_second'] / result['gpus']:.0f}"]
    yield ["TFLOP/s per GPU, every layer counted", f"{run['tflops_per_gpu']:.1f}"]
    yield ["TFLOP/s per GPU, as Megatron reports", str(run["tflops_per_gpu_by_megatron"])]
    yield ["peak memory, GiB", f"{run['peak_gib']:.2f}"]
    yield ["first losses", f"{first}; {random}, from which the farthest is {farthest:.1%}"]
    yield ["last losses", last]
    if run["expert_load"]:
        least, _, most, extreme = run["expert_load"][-1]
        load = f"{least:.2f} to {extreme:.2f}, the most of the median layer {most:.2f}"
        yield ["experts' load in the last step, relative to the mean", load]
    seconds = "{:.0f}; resumed {:.0f}".format(*result["seconds_to_first_step"])
    yield ["seconds to the end of the first step", seconds]


def _reloaded(found: dict[str, Any]) -> str:
    difference, compared, took = found["largest_difference"], "", ""
    if difference is not None:
        compared = f", whose losses differ from the run's by at most {difference:.2e}"
    if "seconds" in found:  # which earlier results do not have
        steps = ", ".join(f"{seconds:.2f}" for seconds in found["seconds"])
        took = f" These steps took {steps} s, with at most {found['peak_gib']:.1f} GiB."
    return (
        f"`{found['recipe']}`, on {counted(found['gpus'], 'GPU')}, loaded the checkpoint of step "
        f"{found['from_step']} and trained steps {found['losses'][0][0]} to "
        f"{found['losses'][-1][0]}{compared}; its first step ended "
        f"{found['seconds_to_first_step']:.0f} s after its start.{took}"
    )


def draw(result: Path) -> Path:
    """Draw the curves of a result into a PNG next to it."""
    data, target = json.loads(result.read_text()), result.with_suffix(".png")
    run, held = data["runs"]["overlay"], data["held_out_losses"]
    steps, _, norms, _ = zip(*run["curve"], strict=True)
    with results.drawing(target, 2, 2, sharex=True) as ((loss, norm), (indexer, load)):
        for name in heads_of(run):
            (line,) = loss.plot(steps, run["losses"][name], lw=0.8, label=name)
            marks = [found[name] for _, found, _, _ in held]
            loss.plot([row[0] for row in held], marks, "o", color=line.get_color())
        loss.set(ylabel="nats per token", title="losses; held out: dots")
        loss.legend()
        norm.plot(steps, norms, lw=0.8)
        norm.set(yscale="log", title="gradient norm")
        for name in run["losses"]:
            if "indexer" in name:
                indexer.plot(steps, run["losses"][name], lw=0.8, label=name)
        indexer.set(xlabel="step", title="loss of the indexers")
        if run["expert_load"]:
            least, low, high, most = zip(*run["expert_load"], strict=True)
            load.fill_between(steps[: len(least)], least, most, alpha=0.25, label="all layers")
            load.fill_between(steps[: len(least)], low, high, alpha=0.5, label="median layer")
            load.legend()
        load.set(xlabel="step", title="tokens of the least and most used expert / mean")
        for axis in (loss, norm, indexer, load):
            axis.axvline(data["resume"]["killed_after_step"], color="gray", ls=":", lw=0.8)
        on = f"{data['gpus']} x {data['stack']['gpu']}"
        loss.figure.suptitle(f"{data['recipe']}, {on}, {data['date']}")
    return target


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
    try:
        recipe = shipped(recipe_name, changes)
        reloads = reload_steps if others else 0
        profile_after = checked(recipe, save_after, kill_after, profile_after, reloads)
        bench = Bench(recipe, changes, *places, timeout)
        options = first_options(bench, save_after, profile_after, held_out)
        again = [reloading(bench, other) for other in others]
        for one, how in ((bench, options), *((one, RunOptions()) for one in again)):
            check_start(one.recipe, replace(how, data=(str(one.data),)), one.site)
            check_gpus(one.recipe)
    except CppmegaError as error:
        raise click.ClickException(error.render().removeprefix("error: ")) from None
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
    stopped, found = killed_and_resumed(bench, tree, options, kill_after, unsaved)
    result |= found
    result["headline"] = headline(result)
    name = name or recipe.name
    text = results.save(bench.out, name, result, page(result))
    loads = RunOptions(load=checkpoints, exit_interval=save_after + reload_steps)
    failed = [stopped.message] if isinstance(stopped, StoodStill) else []
    for one in again:
        try:
            reload = reloaded(one, tree, loads, save_after)
        except (click.ClickException, MemoryError) as error:  # the others can still be loaded
            failed.append(f"{one.recipe.name}: {error}")
        else:
            result.setdefault("reloads", []).append(reload)
            text = results.save(bench.out, name, result, page(result))
    print(text)
    if failed:
        raise click.ClickException("\n".join(failed))


@main.command("draw")
@click.argument("result", type=results.FOLDER)
def drawn(result: Path) -> None:
    """Draw the curves of a result into a PNG next to it."""
    print(draw(result))


if __name__ == "__main__":
    main()
