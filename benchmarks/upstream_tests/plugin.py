"""A pytest plugin that records the outcome of every test, one JSON line at a time.

Each line is flushed at once: if a test ends the process, everything before it is known, and a
second process continues with the tests that have no line yet.
"""

from __future__ import annotations

import gc
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

LONGEST_REASON = 240


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
        if report.failed:
            self.write(report.nodeid, "error", _reason(report))
        elif report.skipped:
            self.write(report.nodeid, "skipped", _reason(report))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Give tests marked `experimental` the flag with which Megatron's CI runs them."""
        if hasattr(item.config.option, "experimental"):
            item.config.option.experimental = item.get_closest_marker("experimental") is not None

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        """Record that a test started; a test that ends the process leaves only this line.

        What the one before has left goes now, on both sides. Some of Megatron's tests destroy the
        process groups in a `__del__`: run by Python's own collector, whose time depends on all the
        code that was imported, it would hit another test.
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
        outcome, reason = self.found.pop(nodeid, ("passed", ""))
        self.write(nodeid, outcome, reason)


STARTED, NOT_RUN = "started", "not run"
FILE_LIMIT = "file limit"
"""How a process ended that ran into the time of its file."""


def outcomes(file: Path) -> dict[str, tuple[str, str]]:
    """Outcome and reason of each test; later lines replace earlier ones."""
    found: dict[str, tuple[str, str]] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        test, outcome, reason = json.loads(line)
        found[test] = (outcome, reason)
    return found


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
