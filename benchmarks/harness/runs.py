"""Training runs, each a process of its own: started, watched, killed and read."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import click
import psutil

from benchmarks import REPOSITORY
from benchmarks.harness import trees
from cppmega.data import corpus
from cppmega.host.wording import counted
from cppmega.recipe import Recipe
from tests.support import command_of, free_port

STARTS = ("dataset_helpers_prebuilt", "dsa_hadamard_transform")
"""Without these, stock does not take a step: no Makefile in the wheel, no Hadamard package."""
Row = dict[str, Any]
"""A line of a run's metrics."""


class Stopped(click.ClickException):
    """A run was stopped; the steps that it has logged count."""


class TimeIsUp(Stopped):
    """It was stopped at its time limit."""


class StoodStill(Stopped):
    """It no longer wrote anything."""


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
    """Seconds without a word after which a run is stopped; a resharded save of 76 GiB took 265."""

    def tree(self, name: str, *options: str) -> Path:
        """A copy of the pristine megatron with a variant's pages; `stock` has those to start."""
        pages = trees.only(STARTS) if name == "stock" else ("--kind", "all")
        return trees.made(self.site, self.work / "trees" / name, *pages, *options)

    def start(self, name: str, tree: Path, *options: str) -> subprocess.Popen[bytes]:
        """Start a training run in a process group of its own."""
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc_per_node", str(self.recipe.gpus)),
            *("-m", "cppmega.run", "--megatron", str(tree)),
            str(REPOSITORY / "scripts" / "train.py"),
            *(self.recipe.name, "--data", str(self.data)),
            *("--data-cache", str(self.work / "cache"), "--metrics", str(self.metrics(name))),
            *(word for change in self.changes for word in ("--set", change)),
            *options,
        ]
        print(f"{name}: {' '.join(command)}", file=sys.stderr)
        with self.log(name).open("ab") as log:
            env = trees.environment(gates=self.recipe.wanted_gates)
            return subprocess.Popen(
                command, env=env, stdout=log, stderr=log, start_new_session=True
            )

    def metrics(self, name: str) -> Path:
        """The file to which a run writes its steps."""
        return self.out / f"{name}.jsonl"

    def log(self, name: str) -> Path:
        """The file with what a run's ranks print."""
        return self.out / f"{name}.log"

    def clear(self, name: str) -> None:
        """Delete what an earlier call wrote, to which a run would append."""
        for old in (self.metrics(name), self.log(name)):
            old.unlink(missing_ok=True)

    def rows(self, name: str) -> list[Row]:
        """The rows of a run so far, headers included; an unfinished line is left out."""
        path = self.metrics(name)
        lines = path.read_text().split("\n")[:-1] if path.is_file() else []
        return [json.loads(line) for line in lines]

    def wait(
        self, name: str, process: subprocess.Popen[bytes], until: int | None = None, after: int = 0
    ) -> None:
        """Wait for its end or step `until`; the first `after` rows are those of an earlier start.

        Raises:
            Stopped: at its time limit, or after `quiet` seconds without a word.
            MemoryError: its GPU had too little memory.
            ClickException: it failed.
        """
        try:
            self._watch(name, process, until, after)
        except BaseException:  # also of a caller that is ended: ranks outlive their parent
            kill(process)
            raise
        if process.returncode:
            said = self.log(name).read_text(errors="replace")
            if "OutOfMemoryError" in said:
                raise MemoryError(name)
            raise click.ClickException(f"{name} exited with {process.returncode}:\n{said[-3000:]}")

    def _watch(
        self, name: str, process: subprocess.Popen[bytes], until: int | None, after: int
    ) -> None:
        """Wait as `wait` does, which ends the run at an error."""
        started = heard = time.monotonic()
        shown, written = 0, -1
        while process.poll() is None:
            step = max((row.get("step", 0) for row in self.rows(name)[after:]), default=0)
            if step >= shown + 10:
                shown = step
                print(f"{name}: step {step}", file=sys.stderr)
            if until is not None and step >= until:
                return
            now, files = time.monotonic(), (self.log(name), self.metrics(name))
            size = sum(file.stat().st_size for file in files if file.is_file())
            heard, written = (heard if size == written else now), size
            if now > started + self.timeout:
                raise TimeIsUp(f"{name} ran for more than {self.timeout:.0f} s")
            if now > heard + self.quiet:
                tail = self.log(name).read_text(errors="replace")[-3000:]
                raise StoodStill(f"{name} stood still for {self.quiet:.0f} s:\n{tail}")
            time.sleep(self.period)


def trained(bench: Any, name: str, tree: Path, *options: str) -> list[Row] | None:
    """The rows of a new run after its end; None if its GPU had too little memory."""
    bench.clear(name)
    try:
        bench.wait(name, bench.start(name, tree, *options))
    except MemoryError:
        return None
    rows: list[Row] = bench.rows(name)
    return rows


def profiled(steps: int, after: int, folder: Path) -> tuple[str, ...]:
    """The options of a run of which some steps are profiled."""
    words = {"--profile": steps, "--profile-after": after, "--profile-folder": folder}
    return tuple(str(word) for option in words.items() for word in option)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a run and all its ranks, which torchrun gives sessions of their own, unwarned."""
    for each in [*psutil.Process(process.pid).children(recursive=True), process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


def prepare(prefix: Path, site: Path, structure: bool = False) -> Path:
    """Prepare the sources of Python's standard library as a dataset."""
    if not corpus.with_suffix(prefix, ".json").is_file():
        command = [sys.executable, str(REPOSITORY / "scripts" / "prepare_data.py")]
        command += ["--out", str(prefix), str(Path(os.__file__).parent), "--suffix", ".py"]
        command += ["--structure"] if structure else []
        subprocess.run(command, check=True, env=trees.environment(site), stdout=sys.stderr)
    return prefix


def said(
    root: Path, code: str, variables: Mapping[str, str], log: Path, timeout: float | None = None
) -> dict[str, Any]:
    """What code prints as JSON on a line of its own, in a process of one rank that runs a tree."""
    rank = {"RANK": "0", "WORLD_SIZE": "1"}
    rank |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with log.open("w") as errors:
        done = subprocess.run(
            command_of(root, code, fresh=True),
            env={**trees.environment(), **rank, **variables},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            timeout=timeout,
        )
    if done.returncode:
        raise click.ClickException(f"{log.stem}: {log.read_text(errors='replace')[-3000:]}")
    lines = [each for each in done.stdout.splitlines() if each.startswith("{")]
    return dict(json.loads(lines[-1]))


_STACK = """
import json, torch
from cppmega.host.packages import version
stack = {'torch': torch.__version__, 'cuda': torch.version.cuda}
stack['gpu'] = torch.cuda.get_device_name()
names = ('megatron-core', 'transformer-engine', 'triton', 'tilelang')
print(json.dumps(stack | {name: version(name) for name in names if version(name)}))
"""


def header(bench: Bench) -> dict[str, Any]:
    """The header of a result: recipe, software, data."""
    command, env = [sys.executable, "-c", _STACK], trees.environment()
    done = subprocess.run(command, capture_output=True, text=True, env=env)
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
        "data": {**described(bench.data), "mock": False},
    }


def described(prefix: Path) -> dict[str, Any]:
    """What a result says about a dataset."""
    found = corpus.open_(prefix)
    fingerprint = found.card.fingerprint if found.card else ""
    return {"fingerprint": fingerprint, "tokens": found.tokens, "documents": found.documents}


def on(result: Mapping[str, Any]) -> str:
    """`2 GPUs; torch 2.11, ...` of a result's header."""
    stack = ", ".join(f"{name} {version}" for name, version in result["stack"].items())
    return f"{counted(result['gpus'], 'GPU')}; {stack}."
