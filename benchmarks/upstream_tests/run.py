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
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import click

from benchmarks import REPOSITORY
from benchmarks.harness import results, trees
from benchmarks.upstream_tests import report, worker
from benchmarks.upstream_tests.worker import Outcomes
from cppmega import __version__
from cppmega.catalogue import loader as catalogue
from cppmega.errors import CppmegaError
from cppmega.host import process
from cppmega.host.packages import version
from cppmega.overlay import receipt
from cppmega.overlay.verdict import FAILURES
from cppmega.tree.installed import Tree, find_root

LAST = 0.25
"""Of the time limit: for what has been begun, and to run again what differs."""
STACK = ("torch", "transformer-engine", "tilelang", "triton")
Round = tuple[Outcomes, Outcomes]


MARKERS = ("internal", "flaky", "flaky_in_dev", "experimental", "launch_on_gb200")
PLUGINS = {"pytest_mock": "pytest_mock", "pytest_asyncio": "pytest_asyncio.plugin"}
"""Used if they are installed."""
ATTEMPTS = 8
"""Processes that one file may end before the rest of its tests is skipped."""


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
    trees.copy(site, root)
    loaded = catalogue.load(catalogues)
    chosen = [page for name, page in loaded.items() if name in pages or (gated and not pages)]
    gates = {page.patch.gate: "1" for page in chosen if page.patch.gate}
    command = [sys.executable, "-m", "cppmega", "apply", "--megatron", str(root), "--json"]
    command += [*trees.only(pages), *(word for x in catalogues for word in ("--patches", str(x)))]
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
        """Start it, to end with this thread; it answers when it has imported what files need."""
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
        """Wait until it is ready; start it again if it has ended."""
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
        found = worker.outcomes(report)
        if ended == worker.FILE_LIMIT and not found:
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
    begun = [test for test, (how, _) in worker.outcomes(report).items() if how == worker.STARTED]
    with report.open("a") as lines:
        lines.writelines(json.dumps([test, _word(ended), ended]) + "\n" for test in begun)
    return bool(begun) and ended != worker.FILE_LIMIT


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
        return run_file(server, file, limits, self.scratch, self.more)

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
    trees.copy(site, scratch / "stock")
    pages, gated, catalogues = (given[name] for name in ("pages", "gated", "patches"))
    overlay = patched(site, scratch / "patched", pages, gated, catalogues)
    on_cpu = device.startswith("CPU")
    how, every = (on_cpu, given["fresh"]), {"stock": {}, "patched": overlay.gates}
    suites = {name: suite(tests, scratch / f"suite-{name}") for name in every}
    both = [Side(n, scratch / n, suites[n], every[n], *how) for n in every]
    files = ordered(suites["stock"], overlay.files, given["wanted"])
    if given["only"] is not None:
        files = [file for file in files if file in given["only"]]
    if not files:
        raise click.UsageError(f"no test_*.py to run in {tests.name}")
    jobs = min(given["jobs"] or (2 if on_cpu else 8), len(files))
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
