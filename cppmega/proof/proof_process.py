"""Start the process that runs proofs, read its answers, and end it in time.

A proof is about code. Its process has a stated environment, so that a switch which somebody set for
one launch cannot decide whether a patch does what it promises.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import TextIO

import msgspec

from cppmega.host import python
from cppmega.proof import frames
from cppmega.proof.messages import Answer, Order, PageOrder, ProofRun, Ready, Side, TextOrder
from cppmega.rewriting import code_text

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


class Worker:
    """A process that proves pages on one side, from now until it is closed.

    Args:
        root: the tree that the worker imports.
        side: what the tree holds.
        pages: the pages, in the order of their results.
        environment: variables of the worker besides the stated ones.
        forks: whether every proof gets its own process.
        ordered: files whose patched texts the worker computes as well.
        python: the program that runs it.
    """

    def __init__(
        self,
        root: str,
        side: Side,
        pages: Sequence[PageOrder],
        environment: Mapping[str, str],
        *,
        forks: bool = True,
        ordered: TextOrder | None = None,
        python: str = sys.executable,
    ) -> None:
        self.texts: Mapping[str, str] | None = None
        """Hashes of the ordered texts, once the worker is ready."""
        self.last = ""
        """The last line that it printed, once it is closed."""
        self._side, self._pages = side, pages
        self._output = os.fdopen(os.memfd_create("output"), "w+", errors="replace")
        self._reader, writer = os.pipe()
        order = Order(
            root=root, side=side, forks=forks, pages=tuple(pages), texts=ordered,
            limit=LIMIT, answers=writer, code=code_text.known(),
        )  # fmt: skip
        try:
            self._process = _started(order, self._output, environment, python)
        finally:
            os.close(writer)

    def answers(self) -> Iterator[tuple[str, ProofRun]]:
        """Yield the result of each page, and close the worker."""
        answered = 0
        try:
            for name, run in self._read():
                answered += 1
                yield name, run
        finally:
            self.close()
        for page in self._pages[answered:]:
            detail = f"the {self._side} process {_describe_end(self._process)}: {self.last[:400]}"
            yield page.name, ProofRun("not-run", detail)

    def close(self) -> None:
        """End the worker and whatever it started; it may be closed already."""
        if self._output.closed:
            return
        _end(self._process)
        os.close(self._reader)
        with self._output:
            self._output.seek(0)
            self.last = (self._output.read().strip().splitlines() or ["it printed nothing"])[-1]

    def _read(self) -> Iterator[tuple[str, ProofRun]]:
        """Yield the answers as they arrive, until one is not the expected one."""
        reader = frames.Reader(self._reader)

        def ended() -> bool:
            return self._process.poll() is not None

        ready = reader.receive(Ready, START, ended)
        if ready is None:
            return
        self.texts = ready.texts
        for page in self._pages:
            answer = reader.receive(Answer, LIMIT + MARGIN, ended)
            if answer is None or answer.name != page.name:
                return
            yield page.name, answer.run


def _started(
    order: Order,
    output: TextIO,
    environment: Mapping[str, str],
    executable: str,
) -> subprocess.Popen[bytes]:
    _, *command = python.command("cppmega.proof.worker")
    with tempfile.TemporaryFile() as written:  # a pipe would hold up this process until it is read
        written.write(msgspec.json.encode(order))
        written.seek(0)
        return subprocess.Popen(
            [executable, *command],
            stdin=written,
            stdout=output,
            stderr=output,
            pass_fds=[order.answers],
            start_new_session=True,  # it is ended together with everything that it started
            env=stated_environment(environment),
        )


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
