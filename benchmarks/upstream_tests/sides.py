"""Two trees, and the processes in which files of Megatron's unit tests run against each of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks import REPOSITORY
from benchmarks.harness import trees as sides
from benchmarks.upstream_tests.plugin import (
    FILE_LIMIT,
    LONGEST_REASON,
    STARTED,
    outcomes,
    without_folders,
)
from cppmega.errors import CppmegaError
from cppmega.host import process
from cppmega.overlay.verdict import FAILURES

WORKER = "benchmarks.upstream_tests.worker"
MARKERS = ("internal", "flaky", "flaky_in_dev", "experimental", "launch_on_gb200")
PLUGINS = {"pytest_mock": "pytest_mock", "pytest_asyncio": "pytest_asyncio.plugin"}
"""Used if they are installed."""
ATTEMPTS = 8
"""Processes that one file may end before the rest of its tests is skipped."""

Outcomes = dict[str, tuple[str, str]]
"""Outcome and reason of each test."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds."""

    test: float
    file: float


@dataclass(frozen=True, slots=True)
class Overlay:
    """The result of `cppmega apply` on the patched tree."""

    version: str
    digest: str
    pages: tuple[str, ...]
    files: tuple[str, ...]
    gates: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Side:
    """One tree with its own copy of the tests, which may write into their own folder."""

    name: str
    root: Path
    suite: Path
    gates: Mapping[str, str]
    stand_ins: bool
    fresh: bool
    """Run each file in a fresh interpreter, even if a fork would do."""


def patched(
    site: Path, root: Path, pages: Sequence[str], gated: bool, catalogues: Sequence[Path] = ()
) -> Overlay:
    """Copy a pristine tree and let the engine apply pages to it, as a user would.

    Args:
        pages: their names; empty for all of them.
        gated: also those that a variable turns on; pages that are named are turned on anyway.
        catalogues: folders with more pages.

    Raises:
        CppmegaError: `not-applied`, with what the engine said.
    """
    from cppmega.catalogue import loader as catalogue

    sides.copy(site, root)
    loaded = catalogue.load(catalogues)
    chosen = [page for name, page in loaded.items() if name in pages or (gated and not pages)]
    gates = {page.patch.gate: "1" for page in chosen if page.patch.gate}
    command = [sys.executable, "-m", "cppmega", "apply", "--megatron", str(root), "--json"]
    for page in pages:
        command += ["--only", page]
    for folder in catalogues:
        command += ["--patches", str(folder)]
    done = subprocess.run(command, env=_environment(gates), capture_output=True, text=True)
    answer = json.loads(done.stdout)
    if done.returncode:
        raise CppmegaError(
            "not-applied",
            _complaint(answer),
            "Without a pristine tree and a patched one there is nothing to compare.",
            f"cppmega apply --megatron {site} --check",
        )
    return _overlay(root, answer, gates)


def _complaint(answer: Mapping[str, Any]) -> str:
    failed = [page for page in answer["patches"] if page["state"] in FAILURES]
    said = [f"{p['name']} is {p['state']} ({p['target']}) {p['detail']}" for p in failed]
    return "; ".join(said) or str(answer.get("error", answer))


def _overlay(root: Path, answer: Mapping[str, Any], gates: Mapping[str, str]) -> Overlay:
    from cppmega.overlay import receipt
    from cppmega.tree.installed import Tree

    applied = receipt.load(Tree(root)).receipt
    return Overlay(
        answer["megatron"]["version"],
        answer["digest"],
        tuple(applied.pages),
        tuple(applied.files),
        gates,
    )


def suite(tests: Path, to: Path) -> Path:
    """Copy the tests to where they import each other as `tests.unit_tests`."""
    copied = to / "tests" / "unit_tests"
    shutil.copytree(tests, copied, ignore=shutil.ignore_patterns("__pycache__"))
    (to / "tests" / "__init__.py").touch()
    markers = "".join(f"\n    {name}: of Megatron's CI" for name in MARKERS)
    (to / "pytest.ini").write_text(f"[pytest]\nmarkers ={markers}\n")
    return to


def _environment(gates: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment, without what would distinguish the sides or two runs."""
    kept = {k: v for k, v in process.alone(os.environ).items() if not k.startswith("CPPMEGA_")}
    path = [kept["PYTHONPATH"]] if kept.get("PYTHONPATH") else []
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join([*path, str(REPOSITORY)]),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "OMP_NUM_THREADS": "1",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking CUDA itself would forbid forks
        "MASTER_ADDR": "127.0.0.1",
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1"),
        **dict.fromkeys(("RANK", "LOCAL_RANK"), "0"),
        **dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"), "1"),
        **gates,
    }


class Server:
    """A process of `worker.py`, which runs one file at a time."""

    def __init__(self, side: Side, log: Path) -> None:
        self.side = side
        self.log = log
        self.process: subprocess.Popen[str] | None = None
        self.extensions = log.with_suffix(".extensions")
        self.ready = False
        self.forks = False
        """Whether files run in forks of the process; otherwise each runs in a fresh interpreter."""

    def launch(self) -> subprocess.Popen[str]:
        """Start it; it then imports what every file needs, and answers when it is ready.

        It ends with the thread that has started it.
        """
        self.close()
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={
                    **_environment(self.side.gates),
                    "TORCH_EXTENSIONS_DIR": str(self.extensions),
                },
            )
        assert self.process.stdin is not None
        order = {
            "root": str(self.side.root),
            "suite": str(self.side.suite),
            "stand_ins": self.side.stand_ins,
            "fresh": self.side.fresh,
        }
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        self.ready = False
        return self.process

    def start(self) -> subprocess.Popen[str]:
        """Wait until it is ready; start it again if it has ended.

        Raises:
            CppmegaError: `no-server`.
        """
        running = self.process
        if running is None or running.poll() is not None:
            running = self.launch()
        if not self.ready and (answer := self._answer(running)) is None:
            raise CppmegaError(
                "no-server",
                f"the process of the {self.side.name} tree ended: {self.log.read_text()[-1500:]}",
                "No test can run on a tree that cannot be imported.",
                "python -c 'import torch, pytest, megatron.training.arguments'",
            )
        if not self.ready:
            self.ready, self.forks = True, bool(answer["forks"])
        return running

    def run(self, job: Mapping[str, Any]) -> str:
        """How the process of one job ended."""
        running = self.start()
        assert running.stdin is not None
        try:
            running.stdin.write(json.dumps(job) + "\n")
            running.stdin.flush()
        except BrokenPipeError:
            return "server ended"
        answer = self._answer(running)
        ended = "server ended" if answer is None else str(answer["ended"])
        if not ended.startswith("status"):  # nobody waits for the compiler of one that was killed
            for lock in self.extensions.rglob("lock"):
                lock.unlink()
        return ended

    @staticmethod
    def _answer(running: subprocess.Popen[str]) -> dict[str, Any] | None:
        assert running.stdout is not None
        line = running.stdout.readline()
        found: dict[str, Any] | None = json.loads(line) if line else None
        return found

    def close(self) -> None:
        """End it and every process that it has started."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()


_NUMBERS = count()


def run_file(
    server: Server, file: str, limits: Limits, scratch: Path, more: Sequence[str]
) -> Outcomes | None:
    """Run one test file, in as many processes as it ends; None if no time was left."""
    with _folder(scratch) as folder:
        report = folder / "report.jsonl"
        until = time.monotonic() + limits.file
        for _ in range(ATTEMPTS):
            left = Limits(limits.test, until - time.monotonic())
            ended = server.run(_job(folder, file, left, more))
            if ended.startswith("status") or not _blamed(report, ended):
                break
        found = outcomes(report)
        if ended == FILE_LIMIT and not found:
            return None
        return _whole(found, file, ended, folder / "log")


@contextmanager
def _folder(scratch: Path) -> Iterator[Path]:
    folder = scratch / f"job{next(_NUMBERS)}"
    folder.mkdir(parents=True)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def _job(folder: Path, file: str, limits: Limits, more: Sequence[str]) -> dict[str, Any]:
    from importlib.util import find_spec

    plugins = [word for name, word in PLUGINS.items() if find_spec(name)]
    arguments = ["-q", "--tb=line", "-c", "pytest.ini", "--rootdir", ".", "-p", "no:cacheprovider"]
    for plugin in plugins:
        arguments += ["-p", plugin]
    temporary = folder / "tmp"
    (temporary / "a").mkdir(parents=True, exist_ok=True)
    return {
        "report": str(folder / "report.jsonl"),
        "log": str(folder / "log"),
        "test_seconds": limits.test,
        "file_seconds": limits.file,
        "environment": {"TMPDIR": str(temporary)},
        "arguments": [*arguments, "--basetemp", str(temporary / "a" / "b"), *more, file],
    }


def _blamed(report: Path, ended: str) -> bool:
    """Record which test ended the process; return whether there was one."""
    begun = [test for test, (how, _) in outcomes(report).items() if how == STARTED]
    word = "timed out" if ended.endswith("limit") else "crashed"
    with report.open("a") as lines:
        for test in begun:
            lines.write(json.dumps([test, word, ended]) + "\n")
    return bool(begun) and ended != FILE_LIMIT


def _whole(found: Outcomes, file: str, ended: str, log: Path) -> Outcomes:
    """Count a file without any outcome as one failed test, with its last output."""
    if found or ended in ("status 0", "status 5"):
        return found
    said = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    word = "timed out" if ended.endswith("limit") else "crashed"
    outcome = "error" if ended.startswith("status") else word
    last = without_folders(said[-1])[:LONGEST_REASON] if said else ""
    return {file: (outcome, f"{ended}: {last}")}
