"""The process that runs proofs against one tree; `cppmega.proof.verify` starts one per side.

It reads an order on stdin, imports what the pages need once, and forks for every page. A page that
needs a GPU has a worker to itself, which does not fork.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import msgspec

from cppmega.catalogue.loader import load_page
from cppmega.host import process
from cppmega.page import Page
from cppmega.proof import frames, hash_seeds
from cppmega.proof.messages import Answer, Order, ProofRun, Ready
from cppmega.rewriting import code_text
from cppmega.tree import installed


def main() -> None:
    """Execute one order."""
    process.end_with_parent(number=signal.SIGKILL)
    process.adopt_orphans()
    gc.disable()  # imports and syntax trees leave little to collect, and much to walk through
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    os.set_inheritable(order.answers, False)
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")  # 0.15 compiles on import
    warnings.simplefilter("ignore")
    code_text.remember(order.code)
    pages = _imported(order) if order.pages else []
    texts = hash_seeds.execute(order.texts) if order.texts else None
    gc.freeze()  # a collection in a fork would walk through all that was imported, and copy it
    gc.enable()
    frames.send(order.answers, Ready(texts))
    for page in pages:
        run = _forked(page, order.answers, order.limit) if order.forks else _here(page)
        frames.send(order.answers, Answer(page.name, run))


def _imported(order: Order) -> list[Page]:
    """Load the pages, and import once what every fork would import for itself."""
    from cppmega.guard import swaps  # a process that only computes texts needs none of it
    from cppmega.guard.files import only_from
    from cppmega.proof import mutant

    pages, imports = [], []
    for ordered in order.pages:
        page = load_page(ordered.name, Path(ordered.path), ordered.catalogue)
        edits = [page.patch.edits[index] for index in ordered.edits]
        pages.append(page)
        imports += [swaps.module_name(edit.path) for edit in edits]
        if order.side != "stock":
            chosen = swaps.runtime_edits(edits)
            mutants = order.side == "mutant"
            swaps.arm(page, [mutant.of_runtime(e) if mutants else e for e in chosen])
    only_from(Path(order.root))
    for name in imports:
        with contextlib.suppress(Exception):  # the proof itself reports what is wrong
            importlib.import_module(name)
    return pages


def _forked(page: Page, answers: int, limit: float) -> ProofRun:
    """Run one proof in a child, read its result, and end every process that it leaves behind."""
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
        if not status and (waited := os.waitpid(child, os.WNOHANG))[0]:
            status.append(waited[1])
        return bool(status)

    run = frames.Reader(reader).receive(ProofRun, limit, ended)
    seconds = time.monotonic() - started
    if run is None:
        how = (
            _describe_end(status[0])
            if _wait_for(ended)
            else f"did not end within {limit:g} seconds"
        )
        run = ProofRun("not-run", f"its process {how}")
    process.end_children()
    os.close(reader)
    return msgspec.structs.replace(run, seconds=seconds)


def _wait_for(condition: Callable[[], bool], seconds: float = 1.0) -> bool:
    """Wait for a condition: a process that has closed its pipe may take a moment to end."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def _describe_end(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"ended with signal {-code}" if code < 0 else f"ended with status {code}"


def _here(page: Page) -> ProofRun:
    """Run a proof in this process, because CUDA does not survive a fork once it is initialized.

    The parent process ends this one if the proof does not return.
    """
    started = time.monotonic()
    run = _prove(page)
    return msgspec.structs.replace(run, seconds=time.monotonic() - started)


def _prove(page: Page) -> ProofRun:
    assert page.verify is not None
    try:
        page.verify()
    except SystemExit as error:  # it does not show that the code is wrong
        return ProofRun("not-run", f"SystemExit: {error}"[:500])
    except BaseException as error:
        text = str(error).strip().partition("\n")[0] or _raising_line(error)
        name = type(error).__name__
        if _is_of_this_machine(error):
            return ProofRun("unable", f"{name}: {text}"[:500])
        return ProofRun("failed", f"{name}: {text}"[:500], error=name)
    return ProofRun("passed", "")


def _is_of_this_machine(error: BaseException) -> bool:
    """Whether an error shows only what an installed package lacks, which is not judged here.

    What a proved package or cppmega itself lacks is a fault of the code, or of the proof.
    """
    match error:
        case ImportError():
            return error.name is not None and error.name.partition(".")[0] not in _JUDGED
        case AttributeError(obj=ModuleType() as module):
            return module.__name__.partition(".")[0] in ("torch", "triton")
        case NotImplementedError():  # of torch's dispatcher, for tensors without values
            return "Meta kernel registered" in str(error) or "'Meta' backend" in str(error)
    return False


_JUDGED = (*installed.PACKAGES.values(), "cppmega")


def _raising_line(error: BaseException) -> str:
    """Return the line that raised an error without a message."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"`{frame.line}` ({Path(frame.filename).name}:{frame.lineno})"


if __name__ == "__main__":
    main()
