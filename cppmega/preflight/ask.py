"""The preflight's child processes: what cannot be known without importing is imported there."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from cppmega.errors import CppmegaError
from cppmega.host import process, python
from cppmega.preflight.messages import Order

_SECONDS = 300

AnOrder = TypeVar("AnOrder", bound=Order)
AnAnswer = TypeVar("AnAnswer", bound=msgspec.Struct)


def ask(
    module: str,
    order: Order,
    answer: type[AnAnswer],
    environ: Mapping[str, str],
    here: bool = False,
) -> AnAnswer:
    """Run one of our worker modules on an order, and decode its answer.

    Args:
        module: the worker, which calls `serve`.
        order: what it is asked.
        answer: the type of its answer.
        environ: its environment; the variables of a rank are left out.
        here: it also imports from the working directory, which the check `shadowing` inspects.

    Raises:
        CppmegaError: `process-hangs`, or `process-ended` with the last line of its stderr.
    """
    order = msgspec.structs.replace(order, parent=os.getpid())
    try:
        done = subprocess.run(
            python.command(module, here=here),
            input=_encoded(order),
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_SECONDS,
            env={**process.alone(environ), "PYTHONDONTWRITEBYTECODE": "1"},
        )
    except subprocess.TimeoutExpired:
        raise CppmegaError(
            "process-hangs",
            f"A process that only imports what a rank imports took over {_SECONDS} seconds.",
            "Every rank would hang there too: often on a file system, or on a lock that a killed "
            "compiler left behind.",
            "remove stale locks from TORCH_EXTENSIONS_DIR and from Triton's cache",
        ) from None
    try:
        return msgspec.convert(json.loads(done.stdout.rpartition("\n")[2]), answer)
    except (ValueError, msgspec.ValidationError):
        printed = done.stderr.strip().splitlines()
        raise CppmegaError(
            "process-ended",
            f"A process started like a rank ended with status {done.returncode}: "
            f"{(printed or ['it printed nothing'])[-1][:400]}",
            "Every rank would end the same way.",
            f"{sys.executable} -P -m {module} < /dev/null",
        ) from None


def serve(order: type[AnOrder], work: Callable[[AnOrder], msgspec.Struct]) -> None:
    """Read an order from stdin, print the answer, and end this process.

    It also ends when the process that asked does: a preflight whose terminal is closed must not
    leave a worker behind that holds a GPU. What imported modules print goes to stderr.
    """
    received = msgspec.convert(json.load(sys.stdin), order)
    process.end_with_parent(received.parent)
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(sys.stderr):
        answer = work(received)
    print("\n" + _encoded(answer), end="", flush=True)
    os._exit(0)  # atexit hooks of a half-started trainer have nothing to add


def _encoded(message: msgspec.Struct) -> str:
    """Encode with the standard library's json, which keeps inf, NaN and undecodable path bytes."""
    return json.dumps(msgspec.to_builtins(message))
