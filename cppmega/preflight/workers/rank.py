"""A process that behaves like a rank up to its first step; started by `cppmega.preflight.ask`.

It imports what a rank imports, in the environment of the launch, compares it with the receipt, and
gives the launch line to the installed version's own parser.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from cppmega.errors import CppmegaError
from cppmega.preflight.ask import serve
from cppmega.preflight.messages import RankAnswer, RankOrder
from cppmega.preflight.workers import line as launch_line

if TYPE_CHECKING:
    from cppmega.overlay.receipt import Receipt


def main() -> None:
    """Answer one order."""
    serve(RankOrder, inspect)


def inspect(order: RankOrder) -> RankAnswer:
    """Import the patched tree, compare it with the receipt, and parse the launch line."""
    if order.only_parses:
        sys.path[:0] = [order.root] if order.root else []
    try:
        problems, imported = ([], "") if order.only_parses else _imported(order)
    except CppmegaError as error:
        return RankAnswer(problems=[error.as_json()])
    line = None
    try:
        line = launch_line.parse(order) if order.argv is not None else None
    except CppmegaError as error:
        problems.append(error)
    return RankAnswer(
        problems=[problem.as_json() for problem in problems], imported=imported, line=line
    )


def _imported(order: RankOrder) -> tuple[list[CppmegaError], str]:
    """Everything that differs in this process from what was applied, and a summary."""
    from cppmega import guard
    from cppmega.guard import files, installed, modules, swaps

    held = guard.start(Path(order.root) if order.root else None)
    root = held.session.read_tree().root
    if root.resolve() != Path(order.expected).resolve():
        raise CppmegaError(
            "other-root",
            f"A training process would import megatron from {root}; the checks inspected "
            f"{order.expected}.",
            "The patched tree would not be the one that trains.",
            "remove the other folder from PYTHONPATH, or pass --megatron ROOT to both",
        )
    for module in _modules(root, held.receipt):
        try:
            importlib.import_module(module)
        except CppmegaError as error:
            return [error], ""
        except BaseException as error:  # a half imported module breaks the next ones: one cause
            return [_import_failed(module, error)], ""
    judged = files.judge(root, held.receipt, order.accepted)
    problems = [*judged.problems]
    try:
        swaps.check()
        modules.check()
    except CppmegaError as error:
        problems.append(error)
    try:
        _refuse_waiting(installed.waiting())
    except CppmegaError as error:
        problems.append(error)
    return problems, judged.summary()


def _modules(root: Path, receipt: Receipt) -> list[str]:
    """The modules that a rank imports: Megatron's training loop, and every patched module."""
    from cppmega.guard import swaps

    targets = [
        swaps.module_name(target.partition(":")[0])
        for page in receipt.pages.values()
        for target in page.targets
    ]
    trainer = root / "megatron" / "training" / "training.py"
    return [*(["megatron.training.training"] if trainer.is_file() else []), *dict.fromkeys(targets)]


def _import_failed(module: str, error: BaseException) -> CppmegaError:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    message = " ".join(str(error).split())[:500]
    return CppmegaError(
        "import-failed",
        f"{module} cannot be imported: {type(error).__name__}: {message}{where}",
        "A run that reaches it ends there, or continues without the patch in it.",
        f"python -c 'import {module}' in the environment that trains",
    )


def _refuse_waiting(targets: list[str]) -> None:
    if targets:
        raise CppmegaError(
            "patch-not-installed",
            f"After every module was imported, {', '.join(targets)} still has its original.",
            "The runtime patch waits for an import that does not happen.",
            "cppmega status; the page's target names a module that Python finds elsewhere",
        )


if __name__ == "__main__":
    main()
