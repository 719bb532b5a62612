"""Train a recipe on stock Megatron and with the overlay, one after the other on the same GPUs.

"Stock" is pristine except for the two patches without which it does not start from a wheel;
"linear" is the overlay with its linear cross-entropy turned on. The runs see the same data in the
same order from the same weights. "tilelang" is the overlay with the fused backend of DSA,
"stock-tilelang" is stock with it, which does not support NAM56R's widths. A further run is killed
and resumed, and its curve compared with that of the overlay, next to the difference between two
uninterrupted runs.

    python -m benchmarks.slices.training run --site SITE --work SCRATCH --out DIR
    python -m benchmarks.slices.training plot DIR/nam56r_h200_slice.json

SITE holds a pristine `megatron/` with its dist-info, as pip or an unpacked wheel leaves them; it is
copied and never changed. Everything else must be importable.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import click
import psutil

from benchmarks import REPOSITORY
from benchmarks.harness import results
from benchmarks.harness import trees as sides
from benchmarks.slices.report import (
    END,
    KILL,
    SAVE,
    compared,
    draw,
    headline,
    losses,
    measured,
    table,
)
from cppmega.data import corpus
from cppmega.recipe import Recipe
from cppmega.recipe import index as recipes_index
from tests.support import command_of, free_port

STARTS = ("dataset_helpers_prebuilt", "dsa_hadamard_transform")
"""Without these, stock does not take a step: no Makefile in the wheel, no Hadamard package."""
_TILELANG = ("dsa_kernel_backend=tilelang", "dsa_indexer_use_sparse_loss=True")
_OPTIONS = {
    "linear": ("--set", "cross_entropy_fusion_impl=linear"),
    "tilelang": tuple(word for change in _TILELANG for word in ("--set", change)),
    # As arguments, which come last: with the fields, the recipe would ask for the overlay's patch.
    "stock-tilelang": ("--", "--dsa-kernel-backend", "tilelang", "--dsa-indexer-use-sparse-loss"),
}
_FULL = "OutOfMemoryError"


@click.group()
def main() -> None:
    """Stock against overlay on a GPU."""


class Stopped(click.ClickException):
    """A run was stopped; the steps that it has logged count."""


class TimeIsUp(Stopped):
    """At its time limit."""


class StoodStill(Stopped):
    """Because it said nothing any more."""


@dataclass
class Bench:
    """The folders, and what all runs have in common."""

    recipe: Recipe
    changes: tuple[str, ...]
    site: Path
    work: Path
    out: Path
    data: Path
    timeout: float
    period: ClassVar[float] = 0.5
    """Seconds between two looks at a run."""
    quiet: ClassVar[float] = 500.0
    """Seconds without a word after which a run is taken to stand still; a resharded save of 76 GiB
    took 265."""

    def tree(self, name: str, *options: str) -> Path:
        """A copy of the pristine megatron with that variant's patches.

        Args:
            name: of the variant; `stock` has only what it needs to start.
            options: of the command that applies the patches.
        """
        root = self.work / "trees" / name
        if not root.is_dir():
            sides.copy(self.site, root)
        starts = [word for page in STARTS for word in ("--only", page)]
        chosen = starts if name == "stock" else ["--kind", "all"]
        command = [sys.executable, "-m", "cppmega.apply_patches", "--megatron", str(root)]
        subprocess.run(
            [*command, *chosen, *options], check=True, env=environment(), stdout=sys.stderr
        )
        return root

    def program(self, tree: Path) -> tuple[str, ...]:
        """What torchrun starts in every rank, before the script and its arguments."""
        return ("-m", "cppmega.run", "--megatron", str(tree))

    def start(self, name: str, tree: Path, *options: str) -> subprocess.Popen[bytes]:
        """Start a training run in a process group of its own."""
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc_per_node", str(self.recipe.gpus), *self.program(tree)),
            str(REPOSITORY / "scripts" / "train.py"),
            *(self.recipe.name, "--data", str(self.data)),
            *("--data-cache", str(self.work / "cache"), "--metrics", str(self.metrics(name))),
            *(word for change in self.changes for word in ("--set", change)),
            *options,
        ]
        log = self.log(name).open("ab")
        print(f"{name}: {' '.join(command)}", file=sys.stderr)
        return subprocess.Popen(
            command, env=environment(), stdout=log, stderr=log, start_new_session=True
        )

    def metrics(self, name: str) -> Path:
        """The file to which a run writes its steps."""
        return self.out / f"{name}.jsonl"

    def clear(self, name: str) -> None:
        """Delete what an earlier call wrote: runs append, so that one can be killed and resumed."""
        for old in (self.metrics(name), self.log(name)):
            old.unlink(missing_ok=True)

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The rows of a run so far, headers included; an unfinished line is left out."""
        path = self.metrics(name)
        if not path.is_file():
            return []
        lines = path.read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines]

    def wait(
        self,
        name: str,
        process: subprocess.Popen[bytes],
        until: int | None = None,
        after: int = 0,
    ) -> None:
        """Wait for a run's end, or until it has logged a step.

        The first `after` rows are those of an earlier start.

        Raises:
            TimeIsUp: it was stopped at its time limit.
            MemoryError: its GPU had too little memory.
            StoodStill: it said nothing for `quiet` seconds, and was stopped.
            ClickException: it failed.
        """
        started = heard = time.monotonic()
        shown, written = 0, -1
        while process.poll() is None:
            step = max((row.get("step", 0) for row in self.rows(name)[after:]), default=0)
            if step >= shown + 10:
                shown = step
                print(f"{name}: step {step}", file=sys.stderr)
            if until is not None and step >= until:
                return
            now = time.monotonic()
            if (size := self._written(name)) != written:
                heard, written = now, size
            if now > started + self.timeout:
                kill(process)
                raise TimeIsUp(f"{name} ran for more than {self.timeout:.0f} s")
            if now > heard + self.quiet:
                kill(process)
                tail = self._last_words(name)
                raise StoodStill(f"{name} stood still for {self.quiet:.0f} s:\n{tail}")
            time.sleep(self.period)
        if process.returncode:
            if _FULL in self.log(name).read_text(errors="replace"):
                raise MemoryError(name)
            tail = self._last_words(name)
            raise click.ClickException(f"{name} exited with {process.returncode}:\n{tail}")

    def until(self, process: subprocess.Popen[bytes], holds: Callable[[], bool], what: str) -> bool:
        """Wait until something holds, and say whether it does; not if the run has ended before.

        Raises:
            TimeIsUp: it was stopped at its time limit; says what did not happen.
        """
        deadline = time.monotonic() + self.timeout
        while not holds():
            if process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                kill(process)
                raise TimeIsUp(f"{what} after {self.timeout:.0f} s more")
            time.sleep(self.period)
        return True

    def log(self, name: str) -> Path:
        """The file with what a run's ranks print."""
        return self.out / f"{name}.log"

    def _last_words(self, name: str) -> str:
        return self.log(name).read_text(errors="replace")[-3000:]

    def _written(self, name: str) -> int:
        """Bytes that a run has written so far."""
        files = (self.log(name), self.metrics(name))
        return sum(file.stat().st_size for file in files if file.is_file())


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a run and all its ranks, which torchrun gives sessions of their own, unwarned."""
    for each in [*psutil.Process(process.pid).children(recursive=True), process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


@main.command()
@results.places("Prepared dataset [made of --text].", required=False)
@click.option("--recipe", default="nam56r_h200_slice", show_default=True)
@click.option("--set", "changes", multiple=True, metavar="FIELD=VALUE", help="Change the recipe.")
@click.option(
    "--text", type=results.FOLDER, multiple=True, help="Text to prepare [Python's own sources]."
)
@click.option(
    "--runs",
    default="stock,overlay,resume",
    show_default=True,
    help="Which: these, linear, tilelang or stock-tilelang.",
)
@click.option("--name", help="Of the result's files [the recipe's].")
@click.option("--timeout", default=500.0, show_default=True, help="Seconds for one run.")
def run(
    site: Path,
    work: Path,
    out: Path,
    recipe: str,
    changes: tuple[str, ...],
    data: Path | None,
    text: tuple[Path, ...],
    runs: str,
    name: str | None,
    timeout: float,
) -> None:
    """Run, and write NAME.json and NAME.md to --out; results of earlier calls are kept."""
    for folder in (work, out):
        folder.mkdir(parents=True, exist_ok=True)
    chosen = recipes_index.with_text(recipes_index.load(recipe), changes)
    prefix = data or prepare(work / "data" / "corpus", text, site, chosen.structure is not None)
    bench = Bench(chosen, changes, site.resolve(), work.resolve(), out.resolve(), prefix, timeout)
    target = out / f"{name or recipe}.json"
    result = json.loads(target.read_text()) if target.is_file() else {}
    result |= header(bench)
    result.setdefault("runs", {})
    for which in runs.split(","):
        if which == "resume":
            result["resume"] = resumed(bench)
        else:
            result["runs"][which] = trained(bench, which)
        result["headline"] = headline(result)
        target.write_text(json.dumps(result, indent=1) + "\n")
        target.with_suffix(".md").write_text(table(result))
    print(table(result))


def trained(bench: Bench, name: str) -> dict[str, Any]:
    """The measurement of one run; running out of memory is a result, too."""
    bench.clear(name)
    tree = bench.tree("stock" if name.startswith("stock") else "overlay")
    try:
        bench.wait(name, bench.start(name, tree, *_OPTIONS.get(name, ())))
    except MemoryError:
        return {"out_of_memory": True}
    return measured(bench.rows(name))


def prepare(prefix: Path, text: tuple[Path, ...], site: Path, structure: bool = False) -> Path:
    """Prepare text as a dataset: the given folders, or the sources of Python's standard library."""
    if not corpus.with_suffix(prefix, ".json").is_file():
        sources = text or (Path(os.__file__).parent,)
        command = [sys.executable, str(REPOSITORY / "scripts" / "prepare_data.py")]
        command += ["--out", str(prefix), *map(str, sources)]
        command += [] if text else ["--suffix", ".py"]
        command += ["--structure"] if structure else []
        subprocess.run(command, check=True, env=environment(site.resolve()), stdout=sys.stderr)
    return prefix


def environment(*first: Path) -> dict[str, str]:
    """This environment, with the repository and then these folders first in PYTHONPATH."""
    folders = (str(REPOSITORY), *map(str, first), os.environ.get("PYTHONPATH"))
    path = os.pathsep.join(filter(None, folders))  # an empty entry would be the current folder
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def said(
    root: Path, code: str, variables: Mapping[str, str], log: Path, timeout: float | None = None
) -> dict[str, Any]:
    """What code prints as JSON on a line of its own, in a process of one rank that runs a tree.

    Args:
        root: the tree.
        code: the text of a module.
        variables: in addition to this environment.
        log: where its standard error goes.
        timeout: seconds after which it is stopped.

    Raises:
        ClickException: it has failed; with the end of the log.
    """
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    rank["MASTER_PORT"] = str(free_port())
    with log.open("w") as errors:
        done = subprocess.run(
            command_of(root, code, fresh=True),
            env={**environment(), **rank, **variables},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            timeout=timeout,
        )
    if done.returncode:
        raise click.ClickException(f"{log.stem}: {log.read_text(errors='replace')[-3000:]}")
    line = [each for each in done.stdout.splitlines() if each.startswith("{")][-1]
    found: dict[str, Any] = json.loads(line)
    return found


def header(bench: Bench) -> dict[str, Any]:
    """The header of the result: recipe, software, data."""
    found = corpus.open_(bench.data)
    code = (
        "import json, torch, importlib.metadata as m\n"
        "stack = {'torch': torch.__version__, 'cuda': torch.version.cuda,"
        " 'gpu': torch.cuda.get_device_name()}\n"
        "for name in ('megatron-core', 'transformer-engine', 'triton', 'tilelang'):\n"
        "    try: stack[name] = m.version(name)\n"
        "    except m.PackageNotFoundError: pass\n"
        "print(json.dumps(stack))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment()
    )
    if done.returncode:
        why = done.stderr.strip().rpartition("\n")[2]
        raise click.ClickException(f"This host has no GPU that torch can use. {why}")
    return {
        "schema": 1,
        "benchmark": "slice_training",
        "recipe": bench.recipe.name,
        "changes": list(bench.changes),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "gpus": bench.recipe.gpus,
        "stack": json.loads(done.stdout),
        "data": {
            "fingerprint": found.card.fingerprint if found.card else "",
            "tokens": found.tokens,
            "documents": found.documents,
            "mock": False,
        },
    }


def resumed(bench: Bench) -> dict[str, Any]:
    """Kill a run without warning, resume it, and compare it with the uninterrupted one."""
    name, tree = "resume", bench.tree("overlay")
    checkpoints = bench.work / f"checkpoints-{datetime.now(UTC):%H%M%S}"  # never one that exists
    bench.clear(name)
    options = [*("--save", str(checkpoints), "--save-interval", str(SAVE))]
    options += ["--exit-interval", str(END)]
    process = bench.start(name, tree, *options)
    bench.wait(name, process, until=KILL)
    kill(process)
    killed = len(bench.rows(name))
    bench.wait(name, bench.start(name, tree, *options))
    rows = bench.rows(name)
    return compared(losses(rows[:killed]), losses(rows[killed:]), losses(bench.rows("overlay")))


@main.command()
@click.argument("result", type=results.FOLDER)
def plot(result: Path) -> None:
    """Draw the curves of a result into a PNG next to it."""
    print(draw(result))


if __name__ == "__main__":
    main()
