"""The process that runs files of Megatron's unit tests against one tree, each in a fork of itself.

Reads an order and then one job per line on stdin, answers each job with one line on stdout. What
every file imports is imported once, before the first fork. If that has initialized CUDA, which does
not survive a fork, or on request, each file gets a fresh interpreter. A plugin of pytest writes the
outcome of every test at once, as a line of JSON: if a test ends the process, a second one continues
with the tests that have no line yet.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import re
import signal
import socket
import sys
import tempfile
import time
import types
import warnings
from pathlib import Path
from typing import Any

import pytest

from cppmega import calls
from cppmega.guard import swaps
from cppmega.guard.files import only_from
from cppmega.host import process
from cppmega.overlay import receipt
from cppmega.overlay.verbs import Session

DOWNLOADS = "tests.test_utils.python_scripts.download_unit_tests_dataset"
IMPORTED_BY_ALL = (
    "megatron.core",
    "megatron.training.argument_utils",
    "tests.unit_tests.test_utilities",
    "tests.unit_tests.dist_checkpointing",
)
_PERIOD = 0.05
LONGEST_REASON = 240
Outcomes = dict[str, tuple[str, str]]
"""Outcome and reason of each test."""
STARTED, NOT_RUN = "started", "not run"
FILE_LIMIT = "file limit"
"""How a process ended that ran into the time of its file."""


class Recorder:
    """Appends to a file; tests that are already in the file do not run again."""

    def __init__(self, file: Path) -> None:
        self.known = {test for test, (how, _) in outcomes(file).items() if how != NOT_RUN}
        self.file = file.open("a", buffering=1)
        self.found: dict[str, tuple[str, str]] = {}

    def write(self, test: str, outcome: str, reason: str = "") -> None:
        self.file.write(json.dumps([test, outcome, reason[:LONGEST_REASON]]) + "\n")

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Deselect what is known; the rest is `not run` until it has run."""
        done = [item for item in items if item.nodeid in self.known]
        items[:] = [item for item in items if item.nodeid not in self.known]
        config.hook.pytest_deselected(items=done)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Write a line for every test of the file before the first starts."""
        for item in session.items:
            self.write(item.nodeid, NOT_RUN)
        gc.freeze()  # what was imported for the tests is not looked at after each of them
        gc.disable()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A module or class that cannot be collected counts as one test."""
        if not report.passed:
            outcome = "error" if report.failed else "skipped"
            self.write(report.nodeid, outcome, _reason(report))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Give tests marked `experimental` the flag with which Megatron's CI runs them."""
        if hasattr(item.config.option, "experimental"):
            item.config.option.experimental = item.get_closest_marker("experimental") is not None

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        """Record that a test started; a test that ends the process leaves only this line.

        What the one before has left goes now, on both sides: some tests destroy the process groups
        in a `__del__`, and run by Python's own collector, it would hit another test.
        """
        for name in ("last_exc", "last_type", "last_value", "last_traceback"):
            vars(sys).pop(name, None)
        gc.collect()
        self.write(nodeid, STARTED)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The worst of setup, call and teardown."""
        outcome = _outcome(report)
        if outcome is not None:
            self.found[report.nodeid] = (outcome, _reason(report))

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        """Record the end of a test."""
        self.write(nodeid, *self.found.pop(nodeid, ("passed", "")))


def outcomes(file: Path) -> Outcomes:
    """Outcome and reason of each test; later lines replace earlier ones."""
    lines = file.read_text().splitlines() if file.exists() else ()
    return {test: (outcome, reason) for test, outcome, reason in map(json.loads, lines)}


def _outcome(report: pytest.TestReport) -> str | None:
    if hasattr(report, "wasxfail"):
        return "xfailed" if report.skipped else "xpassed"
    if report.failed:
        return "failed" if report.when == "call" else "error"
    return "skipped" if report.skipped else None


def _reason(report: pytest.CollectReport | pytest.TestReport) -> str:
    """The first line of an exception's text, or why a test was skipped."""
    given = report.longrepr
    if isinstance(given, tuple):
        return without_folders(str(given[2]).strip().partition("\n")[0])
    crash = getattr(given, "reprcrash", None)
    text = str(crash.message if crash is not None else given or "").strip()
    lines = [line.removeprefix("E").strip() for line in text.splitlines() if line.strip()]
    return without_folders((lines[0] if crash is not None else lines[-1]) if lines else "")


def without_folders(text: str) -> str:
    """Reduce paths to file names: folders identify the machine, and differ between the sides."""
    return re.sub(r"(?<![\w.])/(?:[^/\s'\"]+/)+", ".../", text)


def main() -> None:
    """Serve until standard input ends."""
    process.end_with_parent(number=signal.SIGKILL)
    process.adopt_orphans()
    order = json.loads(sys.stdin.readline())
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    prepare(order)
    if "job" in order:  # a fresh interpreter for one file
        here(order, order["job"])
    forks = not order["fresh"] and (order["stand_ins"] or not cuda_is_awake())
    answers.write(json.dumps({"forks": forks}) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(run(order, json.loads(line), forks)) + "\n")


def prepare(order: dict[str, Any]) -> None:
    """Make the tree importable, arm its runtime patches, import what every file imports."""
    warnings.simplefilter("ignore")
    root = Path(order["root"])
    if order["stand_ins"]:
        from benchmarks.upstream_tests import on_cpu

        on_cpu.install()
    sys.path[0] = order["suite"]  # instead of the working directory, whose `tests` are others
    only_from(root)
    arm(root)
    _refuse_downloads()
    for name in IMPORTED_BY_ALL:
        with contextlib.suppress(Exception):  # the tests will say what is wrong
            importlib.import_module(name)


def arm(root: Path) -> None:
    """Arm the runtime patches of the tree's receipt; a pristine tree has none.

    Megatron's tests also make calls that no kernel supports, which need not end them.
    """
    session = Session(root)
    applied = receipt.load(session.read_tree()).receipt
    if not applied.pages:
        return
    calls.allow(applied.pages)
    plan = session.plan(None, {**os.environ, **applied.gates})
    for name in applied.pages:
        swaps.arm(session.pages[name], plan.edits[name])


def _refuse_downloads() -> None:
    """Skip the datasets that Megatron's conftest downloads into /opt; it continues without them."""

    def download_and_extract_asset(**_: Any) -> None:
        raise ImportError("nothing is downloaded in this run")

    module = types.ModuleType(DOWNLOADS)
    module.download_and_extract_asset = download_and_extract_asset  # type: ignore[attr-defined]
    sys.modules[DOWNLOADS] = module


def cuda_is_awake() -> bool:
    """Whether a fork of this process could not use the GPU, found by trying."""
    if not Path("/dev/nvidiactl").exists():
        return False
    import torch

    if torch.cuda.is_initialized():
        return True
    child = os.fork()
    if child == 0:
        try:
            torch.zeros(1, device="cuda")
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] != 0


def run(order: dict[str, Any], job: dict[str, Any], forks: bool) -> dict[str, Any]:
    """Run one job to its end or its limit; return how its process ended."""
    begun = time.monotonic()
    # The limit of the first test begins here, and not with the last word of an earlier process.
    Path(job["report"]).touch()
    child = os.fork()
    if child == 0:
        process.end_with_parent(number=signal.SIGKILL)
        target = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for source, number in ((os.open(os.devnull, os.O_RDONLY), 0), (target, 1), (target, 2)):
            os.dup2(source, number)
        if forks:
            here(order, job)
        reader, writer = os.pipe()  # become a fresh interpreter that runs this one job
        os.write(writer, json.dumps({**order, "job": job}).encode() + b"\n")
        os.close(writer)
        os.dup2(reader, 0)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    ended = _wait(child, job)
    process.end_children()
    return {"ended": ended, "seconds": time.monotonic() - begun}


def _wait(child: int, job: dict[str, Any]) -> str:
    """`status 0`, `signal 11`, or which limit it ran into."""
    begun = time.monotonic()
    report = Path(job["report"])
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            return f"signal {-code}" if code < 0 else f"status {code}"
        now = time.monotonic()
        if now - begun > job["file_seconds"]:
            return FILE_LIMIT
        if time.time() - report.stat().st_mtime > job["test_seconds"]:  # the last word of a test
            return "test limit"
        time.sleep(_PERIOD)


def here(order: dict[str, Any], job: dict[str, Any]) -> None:
    """Run pytest in this process, then exit at once: leftovers of tests must not delay the end."""
    os.environ |= {**job["environment"], "MASTER_PORT": str(_free_port())}
    tempfile.tempdir = None  # found anew, from the environment
    os.chdir(order["suite"])
    gc.freeze()
    recorder = Recorder(Path(job["report"]))
    code = pytest.main(job["arguments"], plugins=[recorder])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code))


def _free_port() -> int:
    """A TCP port for this process alone, from its id, below the ports the system assigns."""
    first, count = 20000, 12000
    for number in range(os.getpid(), os.getpid() + count):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", first + number % count))
            return first + number % count
    raise OSError("no free port")


if __name__ == "__main__":
    main()
