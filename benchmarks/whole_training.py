"""Train a whole recipe on this host: evaluated, killed once without warning, and resumed.

    python benchmarks/whole_training.py run --site SITE --work SCRATCH --out DIR \\
        --data TRAIN --held-out HELD
    python benchmarks/whole_training.py draw DIR/nam56r_h200_2gpu_ep2.json

TRAIN and HELD are datasets as `python -m cppmega.data.code.command` makes them. The run saves one
checkpoint, is killed some steps after it, and resumes from it: the steps in between are trained
twice, and their losses compared. With --reload RECIPE, that recipe loads the same checkpoint at the
end, with other ranks for example, and trains the steps after it once more. Writes NAME.json and
NAME.md, and `draw` NAME.png.

SITE holds a pristine `megatron/` with its dist-info, as pip or an unpacked wheel leave them; it is
copied and never changed. Everything else must be importable.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

import slice_training  # noqa: E402
import whole_report  # noqa: E402
from slice_report import headline  # noqa: E402
from slice_training import Bench, TimeIsUp  # noqa: E402

from cppmega.checkpoints.tracker import TRACKER  # noqa: E402
from cppmega.data import corpus  # noqa: E402
from cppmega.recipe import index as recipes_index  # noqa: E402

NAME, RELOADED = "overlay", "reloaded"
_FOLDER = click.Path(path_type=Path)


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
    in_time: bool = True
    """Whether it was not stopped at the time limit."""


def part(
    bench: Bench,
    tree: Path,
    options: tuple[str, ...],
    until: int | None = None,
    saved: Path | None = None,
    name: str = NAME,
) -> Part:
    """Start or resume the run; `until`: kill it after this step, and once `saved` is there."""
    log, before = bench.out / f"{name}.log", len(bench.rows(name))
    read = log.stat().st_size if log.is_file() else 0
    started = time.monotonic()
    process = bench.start(name, tree, *options)
    bench.wait(name, process, until=1, after=before)
    first = time.monotonic() - started
    in_time = True
    try:
        bench.wait(name, process, until, after=before)
    except TimeIsUp:
        in_time = False
    if until is not None:
        while saved is not None and not saved.is_file() and process.poll() is None:
            time.sleep(bench.period)  # an asynchronous save is still being written
        slice_training.kill(process)
    said = log.read_bytes()[read:].decode(errors="replace")
    return Part(bench.rows(name)[before:], first, said, in_time)


def reloaded(bench: Bench, tree: Path, other: str, checkpoints: Path, steps: int) -> dict[str, Any]:
    """Load the run's last checkpoint with another recipe, and train some steps after it.

    Its global batch is that of the run, so that the steps have the same samples.
    """
    step = int((checkpoints / TRACKER).read_text())
    kept = [one for one in bench.changes if not one.startswith(("train_iters=", "eval_"))]
    batch = f"global_batch_size={bench.recipe.global_batch_size}"
    changes = (*kept, batch, f"train_iters={step + steps}")
    made = recipes_index.with_text(recipes_index.load(other), changes)
    again = Bench(made, changes, bench.site, bench.work, bench.out, bench.data, bench.timeout)
    again.clear(RELOADED)
    done = part(again, tree, ("--load", str(checkpoints.resolve())), name=RELOADED)
    facts = {"recipe": other, "gpus": made.gpus, "seconds_to_first_step": round(done.first, 1)}
    return {**facts, **whole_report.repeated(done.rows, bench.rows(NAME), step)}


@main.command()
@click.option("--site", type=_FOLDER, required=True, help="Folder with a pristine megatron/.")
@click.option("--work", type=_FOLDER, required=True, help="Scratch: tree, checkpoints, indices.")
@click.option("--out", type=_FOLDER, required=True, help="Results, log and curves.")
@click.option("--data", type=_FOLDER, required=True, help="Prefix of the training data.")
@click.option("--held-out", type=_FOLDER, required=True, help="Prefix of the held-out data.")
@click.option("--recipe", default="nam56r_h200_2gpu_ep2", show_default=True)
@click.option("--set", "changes", multiple=True, metavar="FIELD=VALUE", help="Change the recipe.")
@click.option("--save-after", default=100, show_default=True, help="Step of the checkpoint.")
@click.option("--kill-after", default=110, show_default=True, help="Step before the kill.")
@click.option("--profile-after", default=40, show_default=True, help="Step before the profile.")
@click.option("--reload", "other", metavar="RECIPE", help="Load the checkpoint with it at the end.")
@click.option("--reload-steps", default=5, show_default=True, help="Steps that it trains.")
@click.option("--name", help="Of the result's files [the recipe's].")
@click.option("--timeout", default=1500.0, show_default=True, help="Seconds for one part.")
def run(
    site: Path,
    work: Path,
    out: Path,
    data: Path,
    held_out: Path,
    recipe: str,
    changes: tuple[str, ...],
    save_after: int,
    kill_after: int,
    profile_after: int,
    other: str | None,
    reload_steps: int,
    name: str | None,
    timeout: float,
) -> None:
    """Train, kill, resume and report; --set train_iters=N says how long.

    What the resumed part has done until the time limit is reported, too.
    """
    for folder in (work, out):
        folder.mkdir(parents=True, exist_ok=True)
    chosen = recipes_index.with_text(recipes_index.load(recipe), changes)
    places = (each.resolve() for each in (site, work, out, data))
    bench = Bench(chosen, changes, *places, timeout)
    bench.clear(NAME)
    checkpoints = work / "checkpoints"
    if checkpoints.exists():
        raise click.ClickException(f"{checkpoints} exists: a run would resume from it")
    tree = bench.tree(NAME)
    options = ("--held-out", str(held_out.resolve()), "--save", str(checkpoints.resolve()))
    options += ("--save-interval", str(save_after))
    profile = ("--profile", "2", "--profile-after", str(profile_after))
    profile += ("--profile-folder", str(out.resolve() / "profile"))
    killed = part(bench, tree, options + profile, kill_after, saved=checkpoints / TRACKER)
    saves = room_for_another(checkpoints)
    if not saves:
        options = (*options[:2], "--load", str(checkpoints.resolve()))
    resumed = part(bench, tree, options)
    notes = []
    if not resumed.in_time:
        notes.append(f"It was stopped at its time limit, before step {chosen.train_iters}.")
    if not saves:
        notes.append(
            "The resumed part saved nothing: the disk had no room for a second checkpoint."
        )
    result = {
        **slice_training.header(bench),
        "benchmark": "whole_training",
        "held_out": held_out_facts(held_out.resolve()),
        **whole_report.measured(killed.rows, resumed.rows, save_after),
        "seconds_to_first_step": [round(killed.first, 1), round(resumed.first, 1)],
        "saves": whole_report.saves(killed.said) + whole_report.saves(resumed.said),
    }
    if notes:
        result["note"] = " ".join(notes)
    result["headline"] = headline(result)
    target = out / f"{name or recipe}.json"
    write(target, result)
    if other is not None:
        result["reload"] = reloaded(bench, tree, other, checkpoints, reload_steps)
        write(target, result)
    print(whole_report.page(result))


def write(target: Path, result: dict[str, Any]) -> None:
    """Write the result and its page."""
    target.write_text(json.dumps(result, indent=1) + "\n")
    target.with_suffix(".md").write_text(whole_report.page(result))


def room_for_another(checkpoints: Path) -> bool:
    """Whether the disk has room for a second checkpoint beside the first."""
    size = sum(each.stat().st_size for each in checkpoints.rglob("*") if each.is_file())
    return shutil.disk_usage(checkpoints).free > 1.1 * size


def held_out_facts(prefix: Path) -> dict[str, Any]:
    """What the held-out data are."""
    found = corpus.open_(prefix)
    return {
        "fingerprint": found.card.fingerprint if found.card else "",
        "tokens": found.tokens,
        "documents": found.documents,
    }


@main.command()
@click.argument("result", type=_FOLDER)
def draw(result: Path) -> None:
    """Draw the curves of a result into a PNG next to it."""
    print(whole_report.draw(result))


if __name__ == "__main__":
    main()
