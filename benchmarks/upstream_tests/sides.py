"""Two trees, and the processes in which files of Megatron's unit tests run against each of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import REPOSITORY
from benchmarks.harness import trees as sides
from benchmarks.upstream_tests import worker
from benchmarks.upstream_tests.worker import FILE_LIMIT, outcomes
from cppmega.catalogue import loader as catalogue
from cppmega.errors import CppmegaError
from cppmega.host import process
from cppmega.overlay import receipt
from cppmega.overlay.verdict import FAILURES
from cppmega.tree.installed import Tree

MARKERS = ("internal", "flaky", "flaky_in_dev", "experimental", "launch_on_gb200")
PLUGINS = {"pytest_mock": "pytest_mock", "pytest_asyncio": "pytest_asyncio.plugin"}
"""Used if they are installed."""
ATTEMPTS = 8
"""Processes that one file may end before the rest of its tests is skipped."""

Outcomes = dict[str, tuple[str, str]]
"""Outcome and reason of each test."""


class Limits(NamedTuple):
    test: float
    file: float


class Overlay(NamedTuple):
    """The result of `cppmega apply` on the patched tree."""

    version: str
    digest: str
    pages: tuple[str, ...]
    files: tuple[str, ...]
    gates: Mapping[str, str]


class Side(NamedTuple):
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
    """Copy a pristine tree and let the engine apply pages to it, or all, as a user would.

    Those that a variable turns on are included if they are named, or if all `gated` ones are
    wanted; `catalogues` are folders with more pages.
    """
    sides.copy(site, root)
    loaded = catalogue.load(catalogues)
    chosen = [page for name, page in loaded.items() if name in pages or (gated and not pages)]
    gates = {page.patch.gate: "1" for page in chosen if page.patch.gate}
    command = [sys.executable, "-m", "cppmega", "apply", "--megatron", str(root), "--json"]
    command += [*sides.only(pages), *(word for x in catalogues for word in ("--patches", str(x)))]
    done = subprocess.run(command, env=_environment(gates), capture_output=True, text=True)
    answer = json.loads(done.stdout)
    if done.returncode:
        failed = [page for page in answer["patches"] if page["state"] in FAILURES]
        said = [f"{p['name']} is {p['state']} ({p['target']}) {p['detail']}" for p in failed]
        raise CppmegaError(
            "not-applied",
            "; ".join(said) or str(answer.get("error", answer)),
            "Without a pristine tree and a patched one there is nothing to compare.",
            f"cppmega apply --megatron {site} --check",
        )
    applied = receipt.load(Tree(root)).receipt
    version, files = answer["megatron"]["version"], tuple(applied.files)
    return Overlay(version, answer["digest"], tuple(applied.pages), files, gates)


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
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(filter(None, (kept.get("PYTHONPATH"), str(REPOSITORY)))),
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
    """A process of `worker.py`, which runs one file at a time, in a fork or a fresh interpreter."""

    def __init__(self, side: Side, log: Path) -> None:
        self.side, self.log = side, log
        self.process: subprocess.Popen[str] | None = None
        self.extensions = log.with_suffix(".extensions")
        self.ready = self.forks = False

    def launch(self) -> None:
        """Start it; it then imports what every file needs, and answers when it is ready.

        It ends with the thread that has started it.
        """
        self.close()
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", worker.__name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=_environment(self.side.gates) | {"TORCH_EXTENSIONS_DIR": str(self.extensions)},
            )
        order = {"root": str(self.side.root), "suite": str(self.side.suite)}
        self._tell(order | {"stand_ins": self.side.stand_ins, "fresh": self.side.fresh})
        self.ready = False

    def start(self) -> None:
        """Wait until it is ready; start it again if it has ended.

        Raises:
            CppmegaError: `no-server`.
        """
        if self.process is None or self.process.poll() is not None:
            self.launch()
        if self.ready:
            return
        if (answer := self._answer()) is None:
            raise CppmegaError(
                "no-server",
                f"the process of the {self.side.name} tree ended: {self.log.read_text()[-1500:]}",
                "No test can run on a tree that cannot be imported.",
                "python -c 'import torch, pytest, megatron.training.arguments'",
            )
        self.ready, self.forks = True, bool(answer["forks"])

    def run(self, job: Mapping[str, Any]) -> str:
        """How the process of one job ended."""
        self.start()
        try:
            self._tell(job)
        except BrokenPipeError:
            return "server ended"
        answer = self._answer()
        ended = "server ended" if answer is None else str(answer["ended"])
        if not ended.startswith("status"):  # nobody waits for the compiler of one that was killed
            for lock in self.extensions.rglob("lock"):
                lock.unlink()
        return ended

    def _tell(self, order: Mapping[str, Any]) -> None:
        assert self.process is not None and self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def _answer(self) -> Any:
        """What it says next; None if it has ended."""
        assert self.process is not None and self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def close(self) -> None:
        """End it and every process that it has started."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()


def run_file(
    server: Server, file: str, limits: Limits, scratch: Path, more: Sequence[str]
) -> Outcomes | None:
    """Run one test file, in as many processes as it ends; None if no time was left."""
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch, ignore_cleanup_errors=True) as made:
        folder = Path(made)
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


def _job(folder: Path, file: str, limits: Limits, more: Sequence[str]) -> dict[str, Any]:
    arguments = ["-q", "--tb=line", "-c", "pytest.ini", "--rootdir", ".", "-p", "no:cacheprovider"]
    for package, plugin in PLUGINS.items():
        arguments += ["-p", plugin] if find_spec(package) else []
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
    begun = [test for test, (how, _) in outcomes(report).items() if how == worker.STARTED]
    with report.open("a") as lines:
        lines.writelines(json.dumps([test, _word(ended), ended]) + "\n" for test in begun)
    return bool(begun) and ended != FILE_LIMIT


def _whole(found: Outcomes, file: str, ended: str, log: Path) -> Outcomes:
    """Count a file without any outcome as one failed test, with its last output."""
    if found or ended in ("status 0", "status 5"):
        return found
    said = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    outcome = "error" if ended.startswith("status") else _word(ended)
    last = worker.without_folders(said[-1])[: worker.LONGEST_REASON] if said else ""
    return {file: (outcome, f"{ended}: {last}")}


def _word(ended: str) -> str:
    return "timed out" if ended.endswith("limit") else "crashed"
