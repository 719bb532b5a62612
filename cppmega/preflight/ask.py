"""The preflight's child processes: what cannot be known without importing, imported elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from cppmega.errors import CppmegaError
from cppmega.host import process, python

_SECONDS = 300


def given_order() -> dict[str, Any]:
    """What `ask` wants of this process, which ends with the one that asks.

    A preflight whose terminal is closed must not leave a process behind that holds a GPU.
    """
    found: dict[str, Any] = json.load(sys.stdin)
    process.end_with_parent(found.get("parent"))
    return found


def ask(
    module: str, order: Mapping[str, Any], environ: Mapping[str, str], here: bool = False
) -> dict[str, Any]:
    """Run one of our modules on a JSON order and read its JSON answer.

    Args:
        here: it imports from the working directory too; `shadowing` has looked at that.

    Raises:
        CppmegaError: `process-ended`, with the last line that it said.
    """
    try:
        done = subprocess.run(
            python.command(module, here=here),
            input=json.dumps({**order, "parent": os.getpid()}),
            capture_output=True,
            text=True,
            check=False,
            timeout=_SECONDS,
            env={**process.alone(environ), "PYTHONDONTWRITEBYTECODE": "1"},
        )
    except subprocess.TimeoutExpired:
        raise CppmegaError(
            "process-hangs",
            f"A process that only imports what a rank imports took over {_SECONDS} seconds.",
            "Every rank would hang there too: often a file system, or a compiler that waits for "
            "a lock which a killed process left.",
            "look into TORCH_EXTENSIONS_DIR and the Triton cache for stale locks",
        ) from None
    answer = done.stdout.rpartition("\n{")[2]
    try:
        found: dict[str, Any] = json.loads("{" + answer.removeprefix("{"))
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise CppmegaError(
            "process-ended",
            f"A process started like a rank ended with status {done.returncode}: {last[:400]}",
            "Every rank would end the same way.",
            f"{sys.executable} -P -m {module} < /dev/null",
        ) from None
    return found
