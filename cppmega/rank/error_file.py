"""Why a rank ended, left where torchrun and `cppmega launch` look for it.

torchrun names a file for every rank in the environment and tells the first failure by the times in
them, in whole seconds: ranks that fail because another one did often fall into the same second, so
the exact time is written beside it.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from pathlib import Path

from cppmega.errors import CppmegaError

VARIABLE = "TORCHELASTIC_ERROR_FILE"


def record(error: BaseException) -> None:
    """Write an error to the rank's error file; the first one counts. Never raises."""
    file = os.environ.get(VARIABLE)
    if not file or Path(file).exists():
        return
    own = isinstance(error, CppmegaError)
    text = error.render() if isinstance(error, CppmegaError) else _trace(error)
    now = time.time()
    said = {
        "message": str(error) if own else f"{type(error).__name__}: {error}",
        "extraInfo": {"py_callstack": text, "timestamp": str(int(now)), "time": now},
    }
    try:
        Path(file).write_text(json.dumps({"message": said}))
    except OSError:
        return  # a full disk must not hide the error itself


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)).rstrip()
