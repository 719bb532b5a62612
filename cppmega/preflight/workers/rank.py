"""A process that behaves like a rank up to its first step; started by `cppmega.preflight.ask`.

It imports what a rank imports, in the environment of the launch, compares it with the receipt, and
gives the launch line to the installed version's own parser.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from cppmega.errors import CppmegaError, closest
from cppmega.preflight.ask import serve
from cppmega.preflight.messages import ParsedLine, Problem, RankAnswer, RankOrder

if TYPE_CHECKING:
    from cppmega.overlay.receipt import Receipt


def main() -> None:
    """Answer one order."""
    serve(RankOrder, inspect)


def inspect(order: RankOrder) -> RankAnswer:
    """Import the patched tree, compare it with the receipt, and parse the launch line."""
    try:
        problems, imported = _imported(order)
    except CppmegaError as error:
        return RankAnswer(problems=[Problem.from_error(error)])
    return RankAnswer(
        problems=[Problem.from_error(problem) for problem in problems],
        imported=imported,
        line=parse(order.argv, order.world) if order.argv is not None else None,
    )


def _imported(order: RankOrder) -> tuple[list[CppmegaError], str]:
    """Everything that differs in this process from what was applied, and a summary."""
    from cppmega import guard
    from cppmega.rank import imported, installed, provenance

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
    judged = provenance.judge(root, held.receipt, order.accepted)
    problems = [*judged.problems]
    checks: tuple[Callable[[], None], ...] = (
        lambda: imported.check(root, held.receipt),
        lambda: _refuse_waiting(installed.waiting()),
    )
    for check in checks:
        try:
            check()
        except CppmegaError as error:
            problems.append(error)
    return problems, judged.summary()


def _modules(root: Path, receipt: Receipt) -> list[str]:
    """The modules that a rank imports: Megatron's training loop, and every patched module."""
    from cppmega.rank import swaps

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


def parse(argv: Sequence[str], world: int | None) -> ParsedLine:
    """Run a line through the installed parser and its validation."""
    from cppmega.training import parsing

    try:
        from megatron.training import arguments
    except ImportError as error:
        return ParsedLine(refused=f"there is no parser: {error}")
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(world or 1))
    if {"-h", "--help"} & {*argv}:
        return ParsedLine(refused="it asks for help, which is printed in place of a run")
    sys.argv = ["train", *argv]
    args, reason = parsing.parsed(arguments.parse_args)
    if reason:
        return ParsedLine(refused=reason, near=_near(arguments, argv))
    plain = {name: _plain(value) for name, value in vars(args).items()}
    if world is None:
        model = [getattr(args, f"{n}_model_parallel_size", 1) for n in ("tensor", "pipeline")]
        args.world_size = model[0] * model[1] * args.context_parallel_size
    return ParsedLine(args=plain, invalid=_invalid(arguments, args))


def _near(arguments: Any, argv: Sequence[str]) -> dict[str, str]:
    """Flags unknown to the parser, each with the nearest known one."""
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    known = [flag for action in parser._actions for flag in action.option_strings]
    given = [word.partition("=")[0] for word in argv if word.startswith("--")]
    found = {}
    for flag in dict.fromkeys(given):
        if flag not in known:
            found[flag] = next(iter(closest(flag, known)), "")
    return found


def _invalid(arguments: Any, args: Any) -> str:
    """Why Megatron's own validation would stop the run; empty where it would not."""
    import torch

    if not torch.cuda.is_available():  # the validation asks which GPU it is
        torch.cuda.get_device_capability = lambda *_: (9, 0)
        nine: Any = SimpleNamespace(major=9, minor=0)
        torch.cuda.get_device_properties = lambda *_: nine
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            arguments.validate_args(args)
            if "transformer_engine" in sys.modules:  # the config asks for its version
                arguments.core_transformer_config_from_args(args)
    except (AssertionError, ValueError, NotImplementedError) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return str(error).strip() or f"it requires `{frame.line}`"
    except (ArithmeticError, LookupError, TypeError, OSError) as error:  # of a value
        return f"{type(error).__name__}: {error}"
    except (Exception, SystemExit) as error:
        # Not a refusal: validation needed something that only a rank has.
        print(f"validate_args: {type(error).__name__}: {error}", file=sys.stderr)
    return ""


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, int | float | str | None) else str(value)


if __name__ == "__main__":
    main()
