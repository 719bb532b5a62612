"""The process that runs files of Megatron's unit tests against one tree, each in a fork of itself.

Started by `run.py`. Reads an order and then one job per line on stdin, answers each job
with one line on stdout. What every file imports is imported once, before the first fork. If that
has initialized CUDA, which does not survive a fork, or on request, each file gets a fresh
interpreter.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
import types
import warnings
from pathlib import Path
from typing import Any

from benchmarks.upstream_tests.plugin import FILE_LIMIT, Recorder
from cppmega import calls
from cppmega.host import process
from cppmega.overlay import receipt
from cppmega.overlay.verbs import Session
from cppmega.rank import swaps
from cppmega.rank.imported import only_from

DOWNLOADS = "tests.test_utils.python_scripts.download_unit_tests_dataset"
IMPORTED_BY_ALL = (
    "megatron.core",
    "megatron.training.argument_utils",
    "tests.unit_tests.test_utilities",
    "tests.unit_tests.dist_checkpointing",
)
_PERIOD = 0.05


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
    import pytest  # noqa: F401

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
    import pytest

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
