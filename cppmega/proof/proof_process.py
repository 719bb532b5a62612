"""Start the process that runs proofs, read its answers, and end it in time.

A proof is about code. Its process has a stated environment, so that a switch which somebody set for
one launch cannot decide whether a patch does what it promises.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

import msgspec

from cppmega.host import python
from cppmega.proof import frames
from cppmega.proof.messages import Answer, Order, PageOrder, ProofRun, Ready, Side, TextOrder

LIMIT = 120.0
"""Seconds after which a proof is ended; it should take less than one."""
START = 600.0
"""Seconds that loading the pages and importing Megatron may take, on a slow file system."""
MARGIN = 15.0
"""Seconds in which the worker itself reports a proof that it ended."""

_OF_A_USER = ("HOME", "USER", "LOGNAME", "TZ", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR")
_OF_A_MACHINE = (
    *("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "CONDA_PREFIX"),
    *("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONNOUSERSITE", "PYTHONPYCACHEPREFIX"),
    *("CC", "CXX", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"),
    *("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_PTXAS_PATH"),
    *("TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "TILELANG_CACHE_DIR"),
)
"""Variables that a proof sees as they are: where programs, packages, caches and devices are."""
_FIXED = {
    "PYTHONOPTIMIZE": "",  # proofs use assertions, also in code that they call
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
}


def stated_environment(more: Mapping[str, str]) -> dict[str, str]:
    """The complete environment of a process that proves.

    Args:
        more: variables that depend on what it proves.
    """
    kept = {name: os.environ[name] for name in _OF_A_USER + _OF_A_MACHINE if name in os.environ}
    return {**kept, **more, **_FIXED}


def recorded_environment(more: Mapping[str, str]) -> dict[str, str]:
    """What of that environment may matter to a result, for its record."""
    stated = stated_environment(more).items()
    return {name: value for name, value in sorted(stated) if name not in _OF_A_USER}


def answers(
    root: str,
    side: Side,
    pages: Sequence[PageOrder],
    environment: Mapping[str, str],
    *,
    forks: bool = True,
    ordered: TextOrder | None = None,
    texts: list[Mapping[str, str]] | None = None,
) -> Iterator[tuple[str, ProofRun]]:
    """Have a worker prove pages, and yield the result of each.

    Args:
        root: the tree that the worker imports.
        side: what the tree holds.
        pages: the pages, in the order of their results.
        environment: variables of the worker besides the stated ones.
        forks: whether every proof gets its own process.
        ordered: files whose patched texts the worker computes as well.
        texts: receives the hashes of these texts.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as output:  # libraries may warn
        reader, writer = os.pipe()
        order = Order(
            root=root, side=side, forks=forks, pages=tuple(pages), texts=ordered,
            limit=LIMIT, answers=writer,
        )  # fmt: skip
        try:
            worker = _started(order, output, environment)
        finally:
            os.close(writer)
        answered = 0
        try:
            for name, run in _read(worker, frames.Reader(reader), pages, texts):
                answered += 1
                yield name, run
        finally:
            _end(worker)
            os.close(reader)
        output.seek(0)
        last = (output.read().strip().splitlines() or ["it printed nothing"])[-1]
    for page in pages[answered:]:
        detail = f"the {side} process {_describe_end(worker)}: {last[:400]}"
        yield page.name, ProofRun("not-run", detail)


def _started(
    order: Order, output: IO[str], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    worker = subprocess.Popen(
        python.command("cppmega.proof.worker"),
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        pass_fds=[order.answers],
        start_new_session=True,  # it is ended together with everything that it started
        env=stated_environment(environment),
    )
    assert worker.stdin is not None
    with contextlib.suppress(BrokenPipeError), worker.stdin:  # it ended; the caller reports it
        worker.stdin.write(msgspec.json.encode(order))
    return worker


def _read(
    worker: subprocess.Popen[bytes],
    reader: frames.Reader,
    pages: Sequence[PageOrder],
    texts: list[Mapping[str, str]] | None,
) -> Iterator[tuple[str, ProofRun]]:
    """Yield the answers as they arrive, until one is not the expected one."""

    def ended() -> bool:
        return worker.poll() is not None

    ready = reader.receive(Ready, START, ended)
    if ready is None:
        return
    if ready.texts is not None and texts is not None:
        texts.append(ready.texts)
    for page in pages:
        answer = reader.receive(Answer, LIMIT + MARGIN, ended)
        if answer is None or answer.name != page.name:
            return
        yield page.name, answer.run


def _describe_end(worker: subprocess.Popen[bytes]) -> str:
    if worker.returncode in (0, -signal.SIGKILL):
        return "gave no answer in time, or not the expected one"
    return f"ended with status {worker.returncode}"


def _end(worker: subprocess.Popen[bytes]) -> None:
    """End the worker together with every process of its session."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        worker.wait(0.5)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()
