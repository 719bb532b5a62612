"""Run Megatron's own unit tests on a pristine megatron-core and on a patched copy of it.

A patch must break nothing that stock can do. Megatron's repository has the tests for that; no wheel
contains them and they are not copied here, so this command asks for their folder:
`tests/unit_tests` of a checkout of the release that is installed.

\b
    git -C Megatron-LM archive core_r0.19.0 tests | tar -x -C /tmp/upstream
    python -m benchmarks.upstream_tests.run --tests /tmp/upstream/tests/unit_tests

megatron-core is copied twice, and `cppmega apply` patches one of the copies. Every test file then
runs on both, each in a separate process; files that mention patched modules come first. If the
sides differ, the file runs again on both, and a test whose outcomes overlap is called flaky.
Everything else is a difference, and there must be none. Without a GPU the CPU stands in for it
(`on_cpu.py`): what still fails then fails on both sides. Exit status: 0 nothing differs, 1
something differs, 2 wrong usage or an internal error.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
import queue
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any, TextIO

import click

from benchmarks.harness import results
from benchmarks.harness import trees as sides
from benchmarks.upstream_tests import report
from benchmarks.upstream_tests import sides as trees
from benchmarks.upstream_tests.sides import Limits, Outcomes, Overlay, Server, Side
from cppmega import __version__
from cppmega.errors import CppmegaError
from cppmega.host.packages import version
from cppmega.tree.installed import find_root

LAST = 0.25
"""Of the time limit: for what has been begun, and to run again what differs."""
STACK = ("torch", "transformer-engine", "tilelang", "triton")
Round = tuple[Outcomes, Outcomes]


@dataclass
class Work:
    """A queue of test files that every pair of servers takes from."""

    pairs: Sequence[tuple[Server, Server]]
    limits: Limits
    scratch: Path
    more: Sequence[str]
    until: float
    """No file is started after this time, on the monotonic clock."""
    end: float
    """No file runs for longer."""
    tell: Callable[[str, Round], None]
    done: dict[str, list[Round]] = field(default_factory=dict)
    failed: bool = False

    def run(self, files: Sequence[str]) -> None:
        """Run files on both sides until all are done or the time is up."""
        waiting = queue.SimpleQueue[str]()
        for file in files:
            waiting.put(file)
        with ThreadPoolExecutor(len(self.pairs)) as pool:
            served = [pool.submit(self._serve, waiting, *pair) for pair in self.pairs]
        for each in served:
            each.result()

    def _serve(self, waiting: queue.SimpleQueue[str], stock: Server, patched: Server) -> None:
        try:
            while time.monotonic() < self.until and not self.failed:
                file = waiting.get_nowait()
                one = self._one(stock, file)
                other = self._one(patched, file) if one is not None else None
                if one is not None and other is not None:
                    self.done.setdefault(file, []).append((one, other))
                    self.tell(file, (one, other))
        except queue.Empty:
            pass
        except BaseException:
            self.failed = True
            raise

    def _one(self, server: Server, file: str) -> Outcomes | None:
        limits = Limits(self.limits.test, min(self.limits.file, self.end - time.monotonic()))
        return trees.run_file(server, file, limits, self.scratch, self.more)

    def again(self, reruns: int) -> None:
        """Run files that differ on both sides again, one at a time."""
        alone = replace(self, pairs=self.pairs[:1], until=self.end, tell=lambda *_: None)
        differing = [file for file, rounds in self.done.items() if report.differences(rounds)]
        for _ in range(reruns):
            alone.run(sorted(differing))


def ordered(suite: Path, patched_files: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """The files of tests, or those with a wanted part; those that mention most patches first."""
    patterns = [_mention(path) for path in patched_files]
    scored = []
    for path in (suite / "tests" / "unit_tests").rglob("test_*.py"):
        name = path.relative_to(suite).as_posix()
        if not wanted or any(part in name for part in wanted):
            text = path.read_text(errors="replace")
            scored.append((-sum(bool(p.search(text)) for p in patterns), name))
    return [name for _, name in sorted(scored)]


def _mention(path: str) -> re.Pattern[str]:
    """A pattern of how tests mention a module: by its full name, or as a part of its package."""
    whole = path.removesuffix(".py").replace("/", ".")
    package, _, name = map(re.escape, whole.rpartition("."))
    imported = rf"from {package} import (\([^)]*|[^\n]*)\b{name}\b"
    return re.compile(rf"\b{re.escape(whole)}\b|{imported}")


def facts(overlay: Overlay, tests: Path, device: str, wanted: Sequence[str]) -> dict[str, Any]:
    return {
        "date": date.today().isoformat(),
        "device": device,
        "megatron-core": overlay.version,
        **{name: version(name) or "" for name in STACK},
        "python": platform.python_version(),
        "cppmega": __version__,
        "overlay": overlay.digest,
        "pages": list(overlay.pages),
        "gates": [f"{name}={value}" for name, value in overlay.gates.items()],
        "tests": fingerprint(tests),
        "selected": list(wanted),
        "stand-ins": "the CPU for the GPU, gloo for NCCL" if device.startswith("CPU") else "",
    }


def fingerprint(tests: Path) -> str:
    files, digest = sorted(tests.rglob("*.py")), hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(tests).as_posix()}\n".encode() + path.read_bytes())
    return f"{len(files)} files, sha256 {digest.hexdigest()[:16]}"


def device_name() -> str:
    """The GPU, found by a process that ends: CUDA does not survive the forks to come."""
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    return last or f"CPU, {os.cpu_count()} cores"


class Shown:
    """Lines on stderr: every difference, and how far it has come every 10 seconds."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.passed = total, 0, 0
        self.told = time.monotonic()

    def __call__(self, file: str, both: Round) -> None:
        self.done += 1
        self.passed += report.counts(both[0]).get("passed", 0)
        for one in report.differences([both]):
            print(f"differs: {one.test}: {one.stock[0]}, {one.patched[0]}", file=sys.stderr)
        if time.monotonic() - self.told > 10:
            self.told = time.monotonic()
            said = f"{self.done} of {self.total} files, {self.passed} pass on stock"
            print(said, file=sys.stderr, flush=True)


_FOLDER = click.Path(path_type=Path, exists=True, file_okay=False)


@click.command(context_settings={"help_option_names": ["-h", "--help"]}, help=__doc__)
@click.option("--tests", type=_FOLDER, required=True, help="Megatron's folder tests/unit_tests.")
@click.option("--megatron", "site", type=_FOLDER, help="A pristine megatron/ [the installed one].")
@click.option("--page", "pages", multiple=True, help="Apply only this page; repeatable.")
@click.option("--patches", type=_FOLDER, multiple=True, help="One more catalogue.")
@click.option("--gated", is_flag=True, help="Include the pages that a variable turns on.")
@click.option("--select", "wanted", multiple=True, help="Only files with this in their path.")
@click.option("-k", "expression", help="Only tests that match, as for pytest.")
@click.option("--jobs", type=click.IntRange(1), help="Files at a time (default: 2, on a GPU 8).")
@click.option("--limit", default=0.0, help="Minutes after which it stops [no limit].")
@click.option("--file-seconds", default=120.0, show_default=True, help="For one file on one side.")
@click.option("--test-seconds", default=60.0, show_default=True, help="For one test.")
@click.option("--fresh", is_flag=True, help="A fresh interpreter per file, never a fork.")
@click.option("--reruns", default=2, show_default=True, help="Of files that differ.")
@click.option("--onto", type=click.File(), help="Run what that result (.json) had no time for.")
@click.option("--result", type=results.FOLDER, help="Write FILE.json and FILE.md (no suffix).")
def main(
    tests: Path, site: Path | None, onto: TextIO | None, result: Path | None, **given: Any
) -> None:
    begun = time.monotonic()
    device = device_name()
    earlier = json.load(onto) if onto is not None else None
    given["only"] = earlier["files_without_time"] if earlier is not None else None
    with tempfile.TemporaryDirectory(prefix="upstream-tests-") as scratch:
        answer = compare(tests, site or find_root(), device, Path(scratch), given, begun)
    answer["minutes"] = round((time.monotonic() - begun) / 60, 1)
    if earlier is not None:
        answer = report.merged(earlier, answer)
    if result is not None:
        results.save(result.parent, result.stem, answer, report.table(answer))
    click.echo(report.table(answer))
    sys.exit(0 if report.fine(answer) else 1)


def compare(
    tests: Path, site: Path, device: str, scratch: Path, given: Mapping[str, Any], begun: float
) -> dict[str, Any]:
    """Run everything on both sides, by the options that are given; the content of the result."""
    sides.copy(site, scratch / "stock")
    pages, gated, catalogues = (given[name] for name in ("pages", "gated", "patches"))
    overlay = trees.patched(site, scratch / "patched", pages, gated, catalogues)
    on_cpu = device.startswith("CPU")
    how, every = (on_cpu, given["fresh"]), {"stock": {}, "patched": overlay.gates}
    suites = {name: trees.suite(tests, scratch / f"suite-{name}") for name in every}
    stock, patched = (Side(n, scratch / n, suites[n], every[n], *how) for n in every)
    files = ordered(stock.suite, overlay.files, given["wanted"])
    if given["only"] is not None:
        files = [file for file in files if file in given["only"]]
    if not files:
        raise click.UsageError(f"no test_*.py to run in {tests.name}")
    jobs = min(given["jobs"] or (2 if on_cpu else 8), len(files))
    both = (stock, patched)
    pairs = [tuple(Server(x, scratch / f"{x.name}{n}.log") for x in both) for n in range(jobs)]
    seconds = given["limit"] * 60 or float("inf")
    more = ["-k", given["expression"]] if given["expression"] else []
    limits = Limits(given["test_seconds"], given["file_seconds"])
    with ExitStack() as servers:
        for server in itertools.chain(*pairs):  # all at once, since their imports take long
            servers.callback(server.close)
            server.launch()
        until, end = begun + (1 - LAST) * seconds, begun + seconds
        work = Work(pairs, limits, scratch / "jobs", more, until, end, Shown(len(files)))
        work.run(files)
        work.again(given["reruns"])
    told = facts(overlay, tests, device, given["wanted"])
    told["processes"] = "a fork" if pairs[0][0].forks else "a fresh interpreter"
    left_out = [file for file in files if file not in work.done]
    return report.summary(told, work.done, left_out)


if __name__ == "__main__":
    try:
        main()
    except CppmegaError as error:
        print(error.render(), file=sys.stderr)
        sys.exit(2)
