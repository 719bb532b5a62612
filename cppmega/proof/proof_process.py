"""Start the process that runs proofs, and read its answers: it ends in time, whatever it does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Literal

from cppmega.host import python
from cppmega.host.process import alone
from cppmega.proof import frames

LIMIT = 120.0
"""Seconds after which a proof is ended; it should take less than one."""
START = 600.0
"""Seconds that loading the pages and importing Megatron may take, on a slow file system."""
MARGIN = 15.0
"""Seconds in which the worker itself reports a proof that it ended."""


@dataclass(frozen=True, slots=True)
class Run:
    """What one proof did on one tree."""

    result: Literal["passed", "failed", "not-run"]
    detail: str
    seconds: float = 0.0


def answers(
    order: Mapping[str, Any],
    names: Sequence[str],
    environment: Mapping[str, str],
    texts: list[Mapping[str, str]],
) -> Iterator[tuple[str, Run]]:
    """Have a worker execute an order, and tell what became of each page.

    Args:
        order: what `cppmega.proof.worker` reads on stdin.
        names: the pages, in the order of their answers.
        environment: further variables of the worker.
        texts: gets what the worker makes of the files that the order has, if it has any.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as said:  # libraries warn as they like
        reader, writer = os.pipe()
        try:
            worker = _started({**order, "limit": LIMIT, "answers": writer}, said, environment)
        finally:
            os.close(writer)
        answered = 0
        try:
            for name, run in _read(worker, frames.Reader(reader), names, texts):
                answered += 1
                yield name, run
        finally:
            _end(worker)
            os.close(reader)
        said.seek(0)
        last = (said.read().strip().splitlines() or ["it said nothing"])[-1]
    for name in names[answered:]:
        yield name, Run("not-run", f"the {order['side']} process {_how(worker)}: {last[:400]}")


def _started(
    order: Mapping[str, Any], said: IO[str], environment: Mapping[str, str]
) -> subprocess.Popen[str]:
    worker = subprocess.Popen(
        python.command("cppmega.proof.worker"),
        stdin=subprocess.PIPE,
        stdout=said,
        stderr=said,
        text=True,
        pass_fds=[order["answers"]],
        start_new_session=True,  # it is ended with all that it started
        env={
            **alone(os.environ),
            **environment,
            "PYTHONOPTIMIZE": "",  # proofs are assertions, those of what they call too
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        },
    )
    assert worker.stdin is not None
    with contextlib.suppress(BrokenPipeError), worker.stdin:  # it ended; said by the caller
        worker.stdin.write(json.dumps(order))
    return worker


def _read(
    worker: subprocess.Popen[str],
    reader: frames.Reader,
    names: Sequence[str],
    texts: list[Mapping[str, str]],
) -> Iterator[tuple[str, Run]]:
    """Answers as they come, while each is the one that is due."""

    def ended() -> bool:
        return worker.poll() is not None

    ready = reader.receive(START, ended)
    if ready is None or ready.keys() != {"texts"}:
        return
    if ready["texts"] is not None:
        texts.append(ready["texts"])
    for name in names:
        answer = reader.receive(LIMIT + MARGIN, ended)
        if answer is None or answer.pop("name", None) != name:
            return
        yield name, Run(**answer)


def _how(worker: subprocess.Popen[str]) -> str:
    if worker.returncode in (0, -signal.SIGKILL):
        return "gave no answer in time, or one that was not asked for"
    return f"ended with status {worker.returncode}"


def _end(worker: subprocess.Popen[str]) -> None:
    """End the worker and its session; what it forked ends with it."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        worker.wait(0.5)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()
