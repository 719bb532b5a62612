"""The error that ended a rank: in the error file that torchrun reads, and on stderr.

torchrun names a file for every rank in the environment and finds the first failure by the times in
these files, which are in whole seconds. Ranks that fail because another one did often fall into the
same second, so the exact time is written as well.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from cppmega.errors import CppmegaError
from cppmega.guard import ranks

VARIABLE = "TORCHELASTIC_ERROR_FILE"


def record(error: BaseException) -> None:
    """Write an error to the rank's error file; only the first one counts. Never raises."""
    file = os.environ.get(VARIABLE)
    if not file or Path(file).exists():
        return
    own = isinstance(error, CppmegaError)
    text = error.render() if isinstance(error, CppmegaError) else _trace(error)
    now = time.time()
    content = {
        "message": str(error) if own else f"{type(error).__name__}: {error}",
        "extraInfo": {"py_callstack": text, "timestamp": str(int(now)), "time": now},
    }
    try:
        Path(file).write_text(json.dumps({"message": content}))
    except OSError:
        return  # a full disk must not hide the error itself


def report(error: CppmegaError) -> None:
    """Record an error, and print it with the host and the rank."""
    record(error)
    print(f"[{ranks.where()}]\n{error.render()}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def reported(failed: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Report whatever ends the program of a rank, and exit with the status that belongs to it.

    A `CppmegaError` ends it with status 1 and four lines on stderr, wrong usage with status 2; any
    other exception is recorded and raised. `SystemExit` passes.

    Args:
        failed: called first, for everything but `SystemExit`.
    """
    try:
        yield
    except SystemExit:
        raise
    except CppmegaError as error:
        failed()
        report(error)
        sys.exit(1)
    except click.ClickException as error:
        failed()
        error.show()
        sys.exit(2)
    except BaseException as error:
        failed()
        record(error)
        raise


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)).rstrip()
