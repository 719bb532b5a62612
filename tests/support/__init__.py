"""Trees of every Megatron version, pristine and patched, and processes that import exactly one."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from filelock import FileLock

from cppmega.catalogue import loader as catalogue
from cppmega.overlay import verbs as overlay
from cppmega.overlay.survey import Survey
from cppmega.page import PURPOSES, Page
from cppmega.tree import links, wheels
from tests import forkserver
from tests.support import branches, bytecode

REPOSITORY = Path(__file__).resolve().parents[2]
VERSIONS = ("0.16.1", "0.17.1", "0.18.2", "0.19.2")
"""The last of each series, with pins of its own and proofs; tests of behavior use these."""
NOT_NEEDED = ("upstreamed", "not-applicable", "unported", "off")
RELEASES = (
    *("0.15.0", "0.15.1", "0.15.2", "0.15.3", "0.16.0", "0.16.1"),
    *("0.17.0", "0.17.1", "0.18.0", "0.18.2", "0.19.0", "0.19.2"),
)
"""All that are supported; `apply` must succeed on each of them."""
BRANCHES = {
    "main-d98e8a64": "d98e8a64ddf34856e74b24714e3bedb2f5a39553",
    "dev-d48bd6be": "d48bd6be0a85cc0d6d3cc71e8750cf357cc6bdb1",
}
"""Recorded commits of upstream's branches, on which laws and proofs hold as on releases."""
OTHERS = (
    *("transformer-engine==2.1.0", "transformer-engine==2.11.0"),
    *("transformer-engine==2.19.0", "transformer-engine==2.20.2"),
    *("liger-kernel==0.8.4", "liger-kernel==0.8.5"),
    "mamba-ssm==2.3.2.post1",
)
"""Releases of other packages, on which every page that targets them must apply."""
NEWEST = tuple({release.partition("==")[0]: release for release in OTHERS}.values())
"""The last release of each of them, on which its pages are written to disk and proved."""

_ONE_ROOT = """
import sys as _sys, types as _types
_root = _sys.argv[1]; _sys.argv[1:2] = []
_megatron = _types.ModuleType("megatron")
_megatron.__path__ = [_root + "/megatron"]
_sys.modules["megatron"] = _megatron
_sys.path.insert(0, _root)
"""
_NO_COMPILER = """
from torch.utils import cpp_extension as _extension
def _declined(*_given, **_options):
    raise RuntimeError("the tests compile no extensions")
_extension.load_inline = _declined
"""
"""0.15 compiles an extension whenever it is imported, and continues without it if that fails.

Without CUDA's headers it always fails, after seconds of compilation.
"""
_SAYS_WHERE = """
import faulthandler as _faulthandler
_faulthandler.dump_traceback_later({0})
"""
"""Makes a rank that waits for another one print its stack before it is killed."""
LOWEST_PORT = 20_000
_KERNELS_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
PATIENCE = 900.0
"""Seconds after which a process of a test counts as hung.

CI may run at a quarter of the usual speed, and its disk may stop for seconds.
"""
AFTER_A_KILL = 10.0
"""Seconds after which the output of a killed process counts as held open by another one."""
_surveys: dict[str, Survey] = {}
"""The last survey of each version, whose answers hold for the same bytes."""
TURN = 0.05
"""Seconds for which the output of one of several processes is read at a time."""


@cache
def pristine(version: str) -> Path:
    """ROOT of the unpacked wheel of a version. Shared: copy it before changing anything.

    Of another package's release: its files beside those of the newest Megatron. A test that asks
    for a branch is skipped where its commit cannot be fetched.
    """
    if version in BRANCHES:
        return branches.root(version, BRANCHES[version])
    distribution, _, number = version.rpartition("==")
    root = wheels.unpacked(number, _say, distribution or "megatron-core")
    if not distribution:
        return root
    with made_once(version) as (to, missing):
        if missing:
            shutil.rmtree(to, ignore_errors=True)
            links.join((root, pristine(VERSIONS[-1])), to)
    return to


def _say(message: str) -> None:
    print(message, file=sys.stderr)


@contextlib.contextmanager
def made_once(name: str) -> Iterator[tuple[Path, bool]]:
    """A place that all processes of this session share, and whether it is still to be made.

    The others wait meanwhile, and one that fails leaves nothing to them.
    """
    place = Path(os.environ["TESTS_SCRATCH"]) / name
    done = place.with_name(f"{name}.done")
    with FileLock(place.with_name(f"{name}.lock")):
        yield place, not done.exists()
        done.touch()


def copy(version: str, to: Path) -> Path:
    """A tree of one's own."""
    shutil.copytree(pristine(version), to)
    return to


@cache
def pages() -> dict[str, Page]:
    """Every page of the catalogue, loaded once: that takes longer than to apply one of them."""
    return catalogue.load()


@cache
def patched(version: str, *names: str) -> Path:
    """ROOT of a copy of a version's wheel with only the named pages applied (none: every page).

    Gated pages are turned on by being named. Shared within the session.
    """
    pages = hashlib.sha256(" ".join(names).encode()).hexdigest()[:16] if names else "every-page"
    with made_once(f"{version}-{pages}") as (to, missing):
        if missing:
            shutil.rmtree(to, ignore_errors=True)
            shutil.copytree(pristine(version), to, copy_function=_hard_link)
            _apply(version, to, names)
            _share_bytecode(pristine(version), to)
    return to


def _share_bytecode(original: Path, to: Path) -> None:
    """Let a copy of a tree begin with its bytecode, which a file that was changed does not fit."""
    kept = _kept_bytecode()
    for file in (kept / original.relative_to("/")).rglob("*.pyc"):
        link = kept / to.relative_to("/") / file.relative_to(kept / original.relative_to("/"))
        link.parent.mkdir(parents=True, exist_ok=True)
        link.hardlink_to(file)


def _hard_link(source: str, to: str) -> None:
    """Share a file of a tree in which files are replaced, as the overlay does, and never edited."""
    original = Path(source).resolve()  # a link in the tree of another package's release
    try:
        Path(to).hardlink_to(original)
    except OSError:  # the wheels are in another filesystem
        shutil.copy2(original, to)


def _apply(version: str, to: Path, names: Sequence[str]) -> None:
    session = overlay.Session(to)
    session.pages, session._survey = pages(), _surveys.get(version)
    chosen = [session.pages[name] for name in names] or list(session.pages.values())
    gates = {p.patch.gate: "1" for p in chosen if p.patch.gate} if names else {}
    kinds = () if names else PURPOSES
    outcome = overlay.apply(session, only=names, kinds=kinds, environment=gates)
    done = {v.name for v in outcome.verdicts if v.state in ("applied", "armed")}
    not_needed = {v.name for v in outcome.verdicts if v.state in NOT_NEEDED}
    wanted = set(names) or {v.name for v in outcome.verdicts} - not_needed
    problems = [v for v in outcome.verdicts if v.name in wanted - done]
    assert not problems, f"not applied on {to.name}: {problems}"
    _surveys[version] = outcome.plan.survey


def python(
    root: Path,
    code: str,
    nproc: int = 1,
    env: dict[str, str] | None = None,
    timeout: float = PATIENCE,
    fresh: bool = False,
    interprets: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run code in a process whose `megatron` is exactly `root/megatron`.

    Torch is imported in it already; `fresh` asks for an interpreter that has imported nothing, and
    `interprets` for a process in which Triton interprets kernels.
    With `nproc` > 1: one process per rank, with the variables that torchrun sets; the answer has
    every rank's output one after the other and the first exit status that is not 0.
    """
    base = {
        **environment(root),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(nproc),
        **({forkserver.INTERPRETS: "1"} if interprets else {}),
        **(env or {}),
    }
    where = _SAYS_WHERE.format(0.9 * timeout) if nproc > 1 else ""
    command = command_of(root, code, fresh, where, interprets)
    ranks = [
        subprocess.Popen(
            command,
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(nproc)
    ]
    try:
        found = outputs(ranks, timeout)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    code_ = next((p.returncode for p in ranks if p.returncode), 0)
    out, err = ("".join(part) for part in zip(*found, strict=True))
    return subprocess.CompletedProcess(command, code_, out, err)


def outputs(
    ranks: Sequence[subprocess.Popen[str]], timeout: float = PATIENCE
) -> list[tuple[str, str]]:
    """The output of each rank; all are read in turn, so that none blocks on a full pipe."""
    found: dict[int, tuple[str, str]] = {}
    limit = time.monotonic() + timeout
    while (left := set(range(len(ranks))) - set(found)) and (now := time.monotonic()) < limit:
        turn = TURN if len(left) > 1 else limit - now
        for rank in left:
            with contextlib.suppress(subprocess.TimeoutExpired):
                found[rank] = ranks[rank].communicate(timeout=turn)
    late = sorted(set(range(len(ranks))) - set(found))
    for rank in late:
        ranks[rank].kill()
        found[rank] = _left(ranks[rank])
    ends = "\n".join(f"rank {rank}: {err[-3000:]}" for rank, (_, err) in sorted(found.items()))
    assert not late, f"ranks {late} were still running after {timeout:.0f} s:\n{ends}"
    return [found[rank] for rank in range(len(ranks))]


def _left(killed: subprocess.Popen[str]) -> tuple[str, str]:
    """The output of a killed process, whose end nobody sees while what it started holds it open."""
    try:
        return killed.communicate(timeout=AFTER_A_KILL)
    except subprocess.TimeoutExpired as error:
        for pipe in (killed.stdout, killed.stderr):
            assert pipe is not None
            pipe.close()
        return "", f"{(error.stderr or b'').decode()}\nA process that it started still runs."


def shown(terminal: int) -> bytes:
    """All that was written to the other end of a terminal, which every writer has to close."""
    seen = b""
    with contextlib.suppress(OSError):  # how Linux says that it is closed
        while new := os.read(terminal, 2**16):
            seen += new
    os.close(terminal)
    return seen


def command_of(
    root: Path, code: str, fresh: bool = False, before: str = "", interprets: bool = False
) -> list[str]:
    """A command whose `megatron` is exactly `root/megatron`; see `python`."""
    old = _NO_COMPILER if root.name.startswith("0.15.") else ""
    text = _ONE_ROOT + old + before + textwrap.dedent(code)
    python = sys.executable if fresh else forkserver.executable(interprets)
    return [python, "-c", text, str(root)]


def environment(root: Path) -> dict[str, str]:
    """What the processes of `command_of` need, and nothing of this session's own settings."""
    dropped = ("CPPMEGA_", "PYTHONPATH", "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    return (
        kept
        | _bytecode(root)
        | {
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }
    )


def _bytecode(root: Path) -> dict[str, str]:
    """Where bytecode is kept for the session: that of shared trees, which never change."""
    scratch = os.environ.get("TESTS_SCRATCH")  # benchmarks have none
    if scratch is None or root.parent not in (Path(scratch), wheels.cache() / "trees"):
        return {"PYTHONDONTWRITEBYTECODE": "1"}
    return {"PYTHONPYCACHEPREFIX": str(_kept_bytecode())}


@cache
def _kept_bytecode() -> Path:
    """The folder of the session's bytecode, which begins with that of Python and its packages."""
    with made_once("bytecode") as (folder, missing):
        if missing:
            shutil.rmtree(folder, ignore_errors=True)
            bytecode.link(folder)
    return folder


def free_port() -> int:
    """A TCP port that is free and that no other process will be assigned before it is used.

    The kernel assigns ports of its ephemeral range to every connection, including gloo's, and a
    rank whose port is taken leaves the others waiting. So the port is below that range, if there
    are any below it, and each one is returned once per session.
    """
    kernels = int(_KERNELS_PORTS.read_text().split()[0])
    ports = range(LOWEST_PORT, kernels) or range(LOWEST_PORT, 2**16)
    counter = Path(os.environ.get("TESTS_SCRATCH", tempfile.gettempdir()), "ports")
    with FileLock(counter.with_suffix(".lock")):
        before = int(counter.read_text()) if counter.exists() else random.choice(ports)
        for step in range(1, len(ports)):
            port = ports[(before - ports.start + step) % len(ports)]
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                counter.write_text(str(port))
                return port
    raise OSError(f"no port of {ports} is free")
