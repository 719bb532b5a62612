"""The process that runs proofs against one tree; started by `cppmega.verify`, one per side.

Reads an order as JSON on stdin, imports what the pages need once, then forks for every page. A page
that needs a GPU has a worker to itself, and is proved in it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from cppmega import mutant, runtime
from cppmega.catalogue import load_page
from cppmega.imported import only_from
from cppmega.page import Edit, Page

LIMIT = 120
"""Seconds after which a proof is ended; it should take less than one."""


def main() -> None:
    """Answer one order."""
    order = json.load(sys.stdin)
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")  # 0.15 compiles when it is imported
    warnings.simplefilter("ignore")
    pages = [_load(entry) for entry in order["pages"]]
    only_from(Path(order["root"]))
    with contextlib.redirect_stdout(sys.stderr):
        if order["side"] != "stock":
            for page, edits in pages:
                mutants = order["side"] == "mutant"
                chosen = runtime.runtime_edits(page, edits)
                runtime.arm(page, [mutant.of_runtime(e) if mutants else e for e in chosen])
        _import_targets(edits for _, edits in pages)
    for page, _ in pages:
        answer = _forked(page) if order["forks"] else _here(page)
        print(json.dumps({"name": page.name, **answer}), flush=True)


def _load(entry: dict[str, Any]) -> tuple[Page, list[Edit]]:
    page = load_page(entry["name"], Path(entry["path"]), entry["catalogue"])
    return page, [page.patch.edits[index] for index in entry["edits"]]


def _import_targets(edits: Any) -> None:
    """Import once what every fork would import for itself."""
    for group in edits:
        for edit in group:
            with contextlib.suppress(Exception):  # the proof itself will say what is wrong
                importlib.import_module(runtime.module_name(edit.path))


def _forked(page: Page) -> dict[str, Any]:
    """Run one proof in a child and read its answer through a pipe."""
    reader, writer = os.pipe()
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(reader)
        signal.alarm(LIMIT)
        os.dup2(2, 1)  # what a proof prints is not our answer
        os.write(writer, json.dumps(_prove(page)).encode()[:60000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    seconds = time.monotonic() - started
    if not data:
        code = os.waitstatus_to_exitcode(status)
        how = f"signal {-code}" if code < 0 else f"status {code}"
        return {"result": "failed", "detail": f"the process ended with {how}", "seconds": seconds}
    return {**json.loads(data), "seconds": seconds}


def _here(page: Page) -> dict[str, Any]:
    """Run a proof in this process: CUDA, once initialised, does not survive a fork."""
    started = time.monotonic()
    signal.alarm(LIMIT)
    with contextlib.redirect_stdout(sys.stderr):
        answer = _prove(page)
    return {**answer, "seconds": time.monotonic() - started}


def _prove(page: Page) -> dict[str, str]:
    assert page.verify is not None
    try:
        page.verify()
    except ImportError as error:  # a missing package is no proof of a bug
        return {"result": "not-run", "detail": f"{type(error).__name__}: {error}"[:500]}
    except BaseException as error:
        said = str(error).strip().partition("\n")[0]
        return {"result": "failed", "detail": f"{type(error).__name__}: {said}"[:500]}
    return {"result": "passed", "detail": ""}


if __name__ == "__main__":
    main()
