"""The process that runs proofs against one tree; started by `cppmega.proof.verify`, one per side.

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
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cppmega.catalogue.loader import load_page
from cppmega.host import process
from cppmega.page import Edit, Page
from cppmega.proof import frames, hash_seeds, mutant
from cppmega.rank import swaps
from cppmega.rank.imported import only_from


def main() -> None:
    """Answer one order."""
    process.end_with_parent(number=signal.SIGKILL)
    process.adopt_orphans()
    order = json.load(sys.stdin)
    answers: int = order["answers"]
    os.set_inheritable(answers, False)
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")  # 0.15 compiles when it is imported
    warnings.simplefilter("ignore")
    pages = [_load(entry) for entry in order["pages"]]
    only_from(Path(order["root"]))
    if order["side"] != "stock":
        for page, edits in pages:
            mutants = order["side"] == "mutant"
            chosen = swaps.runtime_edits(page, edits)
            swaps.arm(page, [mutant.of_runtime(e) if mutants else e for e in chosen])
    _import_targets(edits for _, edits in pages)
    texts = hash_seeds.execute(order["texts"]) if order["texts"] else None
    frames.send(answers, {"texts": texts})
    for page, _ in pages:
        answer = _forked(page, answers, order["limit"]) if order["forks"] else _here(page)
        frames.send(answers, {"name": page.name, **answer})


def _load(entry: dict[str, Any]) -> tuple[Page, list[Edit]]:
    page = load_page(entry["name"], Path(entry["path"]), entry["catalogue"])
    return page, [page.patch.edits[index] for index in entry["edits"]]


def _import_targets(edits: Any) -> None:
    """Import once what every fork would import for itself."""
    for group in edits:
        for edit in group:
            with contextlib.suppress(Exception):  # the proof itself will say what is wrong
                importlib.import_module(swaps.module_name(edit.path))


def _forked(page: Page, answers: int, limit: float) -> dict[str, Any]:
    """Run one proof in a child, read its answer, and end all that it leaves behind."""
    reader, writer = os.pipe()
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        process.end_with_parent(number=signal.SIGKILL)
        os.close(reader)
        os.close(answers)
        frames.send(writer, _prove(page))
        os._exit(0)
    os.close(writer)
    status: list[int] = []

    def ended() -> bool:
        if not status and (found := os.waitpid(child, os.WNOHANG))[0]:
            status.append(found[1])
        return bool(status)

    answer = frames.Reader(reader).receive(limit, ended)
    seconds = time.monotonic() - started
    if answer is None:
        how = _how(status[0]) if _comes_true(ended) else f"did not end within {limit:g} seconds"
        answer = {"result": "not-run", "detail": f"its process {how}"}
    process.end_children()
    os.close(reader)
    return {**answer, "seconds": seconds}


def _comes_true(condition: Callable[[], bool], seconds: float = 1.0) -> bool:
    """A process that has closed its pipe may have a moment left until its end."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def _how(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"ended with signal {-code}" if code < 0 else f"ended with status {code}"


def _here(page: Page) -> dict[str, Any]:
    """Run a proof in this process: CUDA, once initialised, does not survive a fork.

    Whoever started the process ends it where the proof does not.
    """
    started = time.monotonic()
    answer = _prove(page)
    return {**answer, "seconds": time.monotonic() - started}


def _prove(page: Page) -> dict[str, str]:
    assert page.verify is not None
    try:
        page.verify()
    except (ImportError, SystemExit) as error:  # neither shows that the code is wrong
        return {"result": "not-run", "detail": f"{type(error).__name__}: {error}"[:500]}
    except BaseException as error:
        said = str(error).strip().partition("\n")[0] or _line(error)
        return {"result": "failed", "detail": f"{type(error).__name__}: {said}"[:500]}
    return {"result": "passed", "detail": ""}


def _line(error: BaseException) -> str:
    """The line that raised an error without a text."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"`{frame.line}` ({Path(frame.filename).name}:{frame.lineno})"


if __name__ == "__main__":
    main()
