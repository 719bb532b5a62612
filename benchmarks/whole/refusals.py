"""How fast a run of several ranks ends if one of them is wrong, and what a kill in a save leaves.

    python -m benchmarks.whole.refusals --site SITE --work SCRATCH --out DIR --data TRAIN --gpus 8

Every case starts `nam56r_small_cut` with a replica on each GPU; the last rank differs:

\b
    whole     it does not: three steps, which show what a start takes
    tampered  a patched file of its tree has one more line
    other     its tree lacks a page that the trees of the others have
    killed    it is killed while the ranks write their second checkpoint; all are started again

For each, DIR/refusals_DEVICE_GPUS.json and .md get the seconds from the start to the end of all
processes (after the kill: from the kill), and which of error, host, rank and file the log names; of
a rank that is killed, torchrun names rank and exit code. A case that trains where it should refuse,
or resumes elsewhere than from its last complete checkpoint, fails the call.
"""

from __future__ import annotations

import re
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import click
import psutil

from benchmarks.harness import results, runs
from benchmarks.harness.gpu import card
from benchmarks.harness.results import Places
from benchmarks.harness.runs import Bench
from cppmega.checkpoints.tracker import TRACKER
from cppmega.host.markdown import table
from cppmega.recipe import index as recipes_index

RECIPE = "nam56r_small_cut"
FILE = "megatron/training/training.py"
"""A patched file."""
PAGE = "optimizer_copies_at_once"
"""A page that changes no result, and that one tree lacks."""
SAVED = 3
"""Steps from one checkpoint to the next."""
_ERROR = re.compile(r"error: ([a-z-]+)$", re.MULTILINE)
_ROOT_CAUSE = re.compile(r"^Root Cause.*?^ +rank +: (\d+).*?^ +exitcode +: (-?\d+)", re.M | re.S)
"""In torchrun's report."""
START = """
import os, runpy, sys
first, last, ranks = sys.argv[1:4]
tree = last if int(os.environ["RANK"]) == int(ranks) - 1 else first
sys.argv[1:4] = ["--megatron", tree]
runpy.run_module("cppmega.run", run_name="__main__")
"""


@dataclass
class Ranks(Bench):
    """Runs whose last rank may have a tree of its own."""

    period: ClassVar[float] = 0.02
    """Shorter than a save of this model takes."""
    last: Path | None = None

    def program(self, tree: Path) -> tuple[str, ...]:
        start = self.work / "start.py"
        start.write_text(START)
        return (str(start), str(tree), str(self.last or tree), str(self.recipe.gpus))

    def ended(self, name: str, process: subprocess.Popen[bytes], since: float) -> dict[str, Any]:
        """Wait for the end of all processes of a run, and say what its log names.

        Raises:
            TimeIsUp: it was stopped at its time limit.
        """
        self.until(process, lambda: process.poll() is not None, "the ranks had not ended")
        seconds = time.monotonic() - since
        said = self.said(name)
        rank = self.recipe.gpus - 1
        return {
            "seconds": round(seconds, 1),
            "status": process.returncode,
            "errors": sorted(set(_ERROR.findall(said))),
            "host and rank": f"host {socket.gethostname()}, rank {rank}" in said,
            "file": FILE in said,
            "first_failure": first_failure(said),
        }


def whole(bench: Ranks) -> dict[str, Any]:
    """All ranks are right: three steps.

    Raises:
        ClickException: they did not train.
    """
    tree, since = bench.tree("whole"), time.monotonic()
    process = bench.start("whole", tree, "--exit-interval", "3")
    bench.wait("whole", process, until=1)
    first = time.monotonic() - since
    found = bench.ended("whole", process, since)
    _demand(found["status"] == 0, f"the run of whole ranks ended with {found['status']}")
    return {**found, "seconds_to_first_step": round(first, 1)}


def tampered(bench: Ranks) -> dict[str, Any]:
    """The last rank's tree has a line that no page has written."""
    bench.last = bench.tree("tampered")
    with (bench.last / FILE).open("a") as file:
        file.write("# by hand\n")
    found = _refused(bench, "tampered", "overlay-not-whole")
    _demand(found["file"], f"{FILE} is not named")
    return found


def other(bench: Ranks) -> dict[str, Any]:
    """The last rank's tree is whole, but lacks a page of the others."""
    bench.last = bench.tree("other", "--without", PAGE)
    return _refused(bench, "other", "overlay-differs")


def _refused(bench: Ranks, name: str, error: str) -> dict[str, Any]:
    since = time.monotonic()
    process = bench.start(name, bench.tree("whole"), "--exit-interval", "3")
    found = bench.ended(name, process, since)
    _demand(not any("step" in row for row in bench.rows(name)), f"{name} trained")
    _demand(found["status"] != 0 and error in found["errors"], f"{name} was not refused: {found}")
    _demand(found["host and rank"], f"{name}: host and rank are not named: {found}")
    return found


def killed(bench: Ranks) -> dict[str, Any]:
    """The last rank is killed in its second save; all resume from the first.

    Raises:
        ClickException: the kill came after the save, or the run resumed from somewhere else.
    """
    folder = bench.work / "checkpoints"
    tree, tracker = bench.tree("whole"), folder / TRACKER
    options = ("--save", str(folder), "--save-interval", str(SAVED))
    process = bench.start("killed", tree, *options)
    second = folder / f"iter_{2 * SAVED:07}"
    begun = bench.until(process, second.is_dir, "the second save had not begun")
    _demand(begun, "the run ended before its second save")
    _rank(process, bench.recipe.gpus - 1).kill()
    found = bench.ended("killed", process, time.monotonic())
    _demand(tracker.read_text().strip() == str(SAVED), "the kill came after the save")
    trained = len(bench.rows("killed"))
    since = time.monotonic()
    again = bench.start("killed", tree, *options, "--exit-interval", str(SAVED + 2))
    bench.wait("killed", again)
    steps = [row["step"] for row in bench.rows("killed")[trained:] if "step" in row]
    _demand(steps[:1] == [SAVED + 1], f"resumed with the steps {steps}")
    seconds = round(time.monotonic() - since, 1)
    return {**found, "resumed_from": steps[0] - 1, "resumed_seconds": seconds}


def first_failure(said: str) -> dict[str, int] | None:
    """The rank that torchrun reports as the first that failed, and its exit code."""
    found = _ROOT_CAUSE.search(said)
    return {"rank": int(found[1]), "exit_code": int(found[2])} if found else None


def _rank(process: subprocess.Popen[bytes], number: int) -> psutil.Process:
    for each in psutil.Process(process.pid).children(recursive=True):
        if each.environ().get("RANK") == str(number):
            return each
    raise click.ClickException(f"rank {number} does not run")


def _demand(holds: object, why: str) -> None:
    if not holds:
        raise click.ClickException(why)


CASES: Mapping[str, Callable[[Ranks], dict[str, Any]]] = {
    "whole": whole,
    "tampered": tampered,
    "other": other,
    "killed": killed,
}


@click.command(help=__doc__)
@results.places("Prefix of the training data.")
@click.option("--gpus", type=click.IntRange(2), default=8, show_default=True, help="Ranks.")
@click.option("--timeout", default=400.0, show_default=True, help="Seconds for one run.")
def main(places: Places, gpus: int, timeout: float) -> None:
    places.create()
    shipped = recipes_index.load(RECIPE)
    batch = gpus * shipped.micro_batch_size
    changes = (f"gpus={gpus}", f"global_batch_size={batch}", "train_iters=20", "eval_interval=0")
    recipe = recipes_index.with_text(shipped, changes)
    result = runs.header(Bench(recipe, changes, *places, timeout))
    cases: dict[str, Any] = {}
    result |= {"benchmark": "refusals", "cases": cases}
    file = f"refusals_{card(result['stack']['gpu'])}_{gpus}"
    for name, case in CASES.items():
        bench = Ranks(recipe, changes, *places, timeout)
        bench.clear(name)
        cases[name] = case(bench)
        text = results.save(places.out, file, result, page(result))
    print(text)


def page(result: dict[str, Any]) -> str:
    cases, first, left = result["cases"], "", ""
    if "whole" in cases:
        seconds = cases["whole"]["seconds_to_first_step"]
        first = f"The first step of whole ranks ended {seconds:.0f} s after their start."
    if "killed" in cases:
        named = "torchrun names none"
        if failed := cases["killed"]["first_failure"]:
            named = f"torchrun names rank {failed['rank']}, exit code {failed['exit_code']}"
        left = (
            f"The rank that was killed wrote the checkpoint of step {2 * SAVED}; its seconds are "
            f"those from the kill to the end of all ranks. As the first that failed, {named}. "
            f"Started again, they resumed from the complete one of step "
            f"{cases['killed']['resumed_from']}."
        )
    columns = ["case", "seconds to the end of all ranks", "exit status", "errors"]
    rows = (
        [
            *(
                name,
                f"{found['seconds']:.1f}",
                str(found["status"]),
                ", ".join(found["errors"]) or "none",
            ),
            ", ".join(each for each in ("host and rank", "file") if found[each]),
        ]
        for name, found in cases.items()
    )
    return results.page(
        f"# One rank of {result['gpus']} is wrong, {result['date']}",
        f"Written by `benchmarks/refusals.py`. {runs.on(result)}",
        table([*columns, "the log names"], rows),
        first,
        left,
    )


if __name__ == "__main__":
    main()
