"""The guard of a process: it starts with the run, looks at every step that matters, and ends it.

The process is compared with the receipt before the first step, after it, at every checkpoint and at
the end of the run. What no check detects is listed in README.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from cppmega import calls
from cppmega.catalogue import gates
from cppmega.errors import CppmegaError
from cppmega.guard import (
    agreement,
    children,
    end_record,
    files,
    given,
    import_hook,
    imports,
    installed,
    interpreter,
    ledger,
    ranks,
    reached,
    rules,
    step_log,
    swaps,
)
from cppmega.guard.held import Guard
from cppmega.guard.ranks import gather, where
from cppmega.host import env
from cppmega.overlay import receipt
from cppmega.overlay.compute import overlay_digest
from cppmega.overlay.plan import Plan
from cppmega.overlay.receipt import Receipt
from cppmega.overlay.verbs import Session

T = TypeVar("T")

_APPLY = "python -m cppmega.apply_patches"
_NAMES = "patches.txt"
"""The file of a run folder that names the pages which the first step has reached."""


_GUARD: Guard | None = None


def active() -> Guard | None:
    """The guard of this process; None if the script runs without `cppmega.run`."""
    return _GUARD


def start(root: Path | None = None, *, inherited: bool = False, trains: bool = True) -> Guard:
    """Check the tree, arm the runtime patches, watch for Megatron's first step.

    Args:
        root: the tree that `megatron` must come from; None: the one Python would import.
        inherited: whether this process was started by a guarded one, which has already compared
            the gates with the receipt.
        trains: whether the script is to train, so that calls must not be declined.

    Raises:
        CppmegaError: `unknown-page`, `no-receipt`, `overlay-not-whole`, `gate-differs`, `too-late`,
            `optimized-python`, `isolated-python`, and the errors of reading the tree.
    """
    global _GUARD
    if not inherited:
        interpreter.check()
        ledger.join_or_forget(os.environ, env.OVERLAY.name, env.ROOT.name, env.PYTHON.name)
    if root is not None:
        files.only_from(root)
    session = Session(root)
    calls.check_allowed(session.pages)
    loaded = receipt.load(session.read_tree())
    gates.check(session.pages.values())
    receipt.refuse_missing(loaded, session.root, f"{where()}: ")
    if not inherited:
        gates.check_applied(session.pages.values(), loaded.receipt.gates, os.environ, where())
    plan = session.plan(None, {**os.environ, **loaded.receipt.gates})
    _refuse_incomplete(plan, loaded.receipt)
    if _GUARD is None:
        os.register_at_fork(after_in_child=_reset_in_fork)
    _GUARD = Guard(session, loaded.receipt, plan.edits)
    files.watch(session.read_tree().root, loaded.receipt, plan.edits)
    for name in loaded.receipt.pages:
        swaps.arm(session.pages[name], plan.edits[name])
    calls.judged_by(_must_be_served if trains else None)
    _watch_megatron()
    if trains:
        _watch_optimizers()
    ranks.watch()
    _pass_to_children(_GUARD)
    if not inherited:
        children.keep_this_process(where())
    return _GUARD


def _refuse_incomplete(plan: Plan, applied: Receipt) -> None:
    wrong = [v for v in plan.verdicts.values() if v.blocks]
    if not wrong and overlay_digest(applied) == applied.digest:
        return
    named = "; ".join(f"{v.name} is {v.state} ({v.target}) {v.detail}".rstrip() for v in wrong[:3])
    named += f"; {len(wrong) - 3} more" if len(wrong) > 3 else ""
    command = wrong[0].next if wrong else ""
    raise CppmegaError(
        "overlay-not-whole",
        f"{where()}: {named or 'the receipt was changed by hand'}.",
        "This rank would train different code from what the receipt records.",
        command or _APPLY,
    )


def _reset_in_fork() -> None:
    """Forget the parent's steps in a fork: if it trains, it is checked like any other process."""
    if _GUARD is not None:
        _GUARD.began = _GUARD.stepped = False


def _remembering_refusal(check: Callable[..., None]) -> Callable[..., None]:
    """Wrap a check so that its first refusal lasts to the end of the run, even if it is caught."""

    @functools.wraps(check)
    def checked(*args: Any, **kwargs: Any) -> None:
        try:
            check(*args, **kwargs)
        except CppmegaError as error:
            refuse(error)
            raise

    return checked


def refuse(error: CppmegaError) -> None:
    """Remember a refusal: this process must not end successfully."""
    if _GUARD is not None and _GUARD.refused is None:
        _GUARD.refused = error
        ledger.write("refused", where=where(), error=error.as_json())


def _must_be_served(error: calls.CallDeclinedError) -> bool:
    """Whether a declined call ends the run: its arguments or its recipe have promised the page."""
    if _GUARD is None or not reached.is_promised(_GUARD, error.page):
        return False
    refuse(error)
    return True


def steps(batches: Iterable[T], *args: Any, unguarded: bool = False) -> Iterator[T]:
    """Iterate over the batches of a custom loop, with the checks before and after its first step.

    Args:
        batches: the batches of the loop.
        args: what the run trains, for pages that are reached only with some of it: the model's
            configuration and those of DDP and of the optimizer, or Megatron's parsed arguments,
            and dicts with the names of either.
        unguarded: train without the guard if the script was not started by `cppmega.run`; the
            script's option `--unguarded` means the same.

    Raises:
        CppmegaError: `not-guarded`, and what the checks raise.
    """
    if _GUARD is None:
        if not (unguarded or "--unguarded" in sys.argv[1:]):
            raise CppmegaError(
                "not-guarded",
                "The loop marks its steps, and the script was not started by cppmega.run.",
                "Nothing would compare the code that trains with what was applied.",
                f"python -m cppmega.run {sys.argv[0]} ..., or, to train without the guard, "
                "steps(loader, config, unguarded=True)",
            )
        yield from batches
        return
    _GUARD.arguments = given.of(*args) if args else None
    before_first_step()
    for batch in batches:
        yield batch
        after_first_step()


@_remembering_refusal
def before_first_step() -> None:
    """Compare this process with the receipt, and all ranks with each other; later calls do nothing.

    Raises:
        CppmegaError: on every rank, if one of them fails a check, or the run breaks a rule.
    """
    if _GUARD is None or _GUARD.began:
        return
    agreement.refuse(gather(agreement.answer(_GUARD)), "")
    agreement.refuse_first(gather((where(), rules.broken(_GUARD))))
    _GUARD.began = True


def recheck(when: str, *, together: bool = False) -> None:
    """Compare this process with the receipt once more.

    Args:
        when: for the message, as in "at the end of the run".
        together: every rank takes part, and all of them stop if one fails; only where every rank
            is certain to call it.

    Raises:
        CppmegaError: what `agreement.refuse` raises.
    """
    if _GUARD is not None:
        mine = agreement.answer(_GUARD)
        agreement.refuse(gather(mine) if together else [mine], when)


def recheck_memory(when: str) -> None:
    """Compare the code in memory, without the files on disk, once more.

    Raises:
        CppmegaError: what `modules.check` and `swaps.check` raise.
    """
    if _GUARD is not None:
        agreement.refuse_first([(where(), agreement.problem_of_this_process())], when)


@_remembering_refusal
def after_first_step(*args: Any) -> None:
    """Stop the run if a page that had to be reached was not reached on any rank.

    Args:
        args: as `steps` takes them; by default what it was given.

    Raises:
        CppmegaError: `page-not-reached`, `arguments-not-given`, and what `agreement.refuse` raises;
            on every rank.
    """
    if _GUARD is None or _GUARD.stepped:
        return
    everyone = gather(agreement.answer(_GUARD, reached.here(_GUARD), calls.counts()))
    agreement.refuse(everyone, "after the first step")
    seen = reached.together(one.seen for one in everyone)
    required = reached.required(_GUARD, _arguments(args), reached.FIRST_STEP, seen)
    reached.refuse_missing(_GUARD, required - seen.reached, where(), "the first step")
    _GUARD.stepped = True
    ledger.write("stepped")
    counted = calls.summary(one.calls for one in everyone)
    _say(reached.summary(_GUARD, seen.reached, counted))
    names = reached.names(_GUARD, seen.reached)
    if env.VERBOSE.read():
        _say(names)
    if ranks.rank() == 0 and (node := end_record.node_of_this_rank()) is not None:
        with contextlib.suppress(OSError):
            node.run.path.joinpath(_NAMES).write_text(names + "\n")


def after_first_log(*args: Any) -> None:
    """Like `after_first_step`, for pages that are reached when Megatron logs a step."""
    _after_first("log", "the first log", args)


@_remembering_refusal
def after_first_save(*args: Any) -> None:
    """Like `after_first_step`, for pages that are reached when a checkpoint is saved.

    A custom loop calls it on every rank after each checkpoint, and the code is compared each time.
    """
    recheck("after a checkpoint", together=True)
    _after_first("save", "the first checkpoint", args)


@_remembering_refusal
def _after_first(phase: str, when: str, args: tuple[Any, ...]) -> None:
    if _GUARD is None or phase in _GUARD.ended:
        return
    seen = reached.together(gather(reached.here(_GUARD)))
    required = reached.required(_GUARD, _arguments(args), (phase,), seen)
    reached.refuse_missing(_GUARD, required - seen.reached, where(), when)
    _GUARD.ended.add(phase)


def _arguments(args: tuple[Any, ...]) -> Any:
    assert _GUARD is not None
    return given.of(*args) if args else rules.arguments_of(_GUARD)


@_remembering_refusal
def _before_save() -> None:
    """Compare this process with the receipt: different code must not replace a good checkpoint.

    Files that were replaced on disk since they were imported do not change this process. The run
    ends for them, on every rank, after its checkpoint is saved.

    Raises:
        CppmegaError: what `agreement.refuse` raises.
    """
    if _GUARD is None:
        return
    everyone = gather(agreement.answer(_GUARD))
    agreement.refuse(everyone, "before a checkpoint", keep_replaced=True)
    try:
        agreement.refuse_first(
            [(one.where, one.replaced) for one in everyone], "before a checkpoint"
        )
    except CppmegaError as error:
        _GUARD.replaced = error
        refuse(error)
        _say("cppmega: files of the run were replaced; a checkpoint is saved before it ends")


@_remembering_refusal
def _after_save(args: Any) -> None:
    """Check the pages that are reached at a save, or end a run whose files were replaced.

    Raises:
        CppmegaError: `page-not-reached`, or what `_before_save` has found.
    """
    if _GUARD is None or _GUARD.replaced is None:
        _after_first("save", "the first checkpoint", (args,))
        return
    training = sys.modules[_TRAINING]
    if hasattr(training, "maybe_finalize_async_save"):
        training.maybe_finalize_async_save(blocking=True)
    _say("cppmega: the checkpoint is saved")
    raise _GUARD.replaced


def _say(text: str) -> None:
    if ranks.rank() == 0:
        with contextlib.suppress(OSError):  # a full disk behind stderr must not end the run
            print(text, file=sys.stderr, flush=True)


def no_step_because(reason: str) -> None:
    """Declare that this process takes no step; the reason is printed when it ends."""
    if _GUARD is not None:
        _GUARD.excuse = reason


def finish(excuse: str = "") -> None:
    """Check a script that has ended: a run without a step that was seen has not been checked.

    Args:
        excuse: why there was no step to see; empty if there had to be one.

    Raises:
        CppmegaError: `no-step-seen`, what `recheck` raises, and the first refusal that the script
            has caught.
    """
    if _GUARD is None:
        return
    if _GUARD.refused is not None:
        raise _GUARD.refused
    if not (_GUARD.stepped or excuse):
        raise _no_step_seen(
            "the script ended in its first step, or left the loop there, and no end"
            if _GUARD.began
            else "the script ended, and no step"
        )
    recheck("at the end of the run")


_TRAINING = "megatron.training.training"


def _watch_megatron() -> None:
    """Find Megatron's steps, logs and checkpoints without the script's help."""
    around: dict[str, tuple[Callable[[], None], Callable[[Any], None]]] = {
        "train_step": (before_first_step, after_first_step),
        "training_log": (lambda: None, after_first_log),
        "save_checkpoint": (_before_save, _after_save),
    }

    def wrap(module: ModuleType) -> None:
        # train() looks these names up in its own module, so replacing them there is enough.
        for name, (before, after) in around.items():
            imports.replace(module, name, _around(getattr(module, name), before, after))
        step_log.watch(module)

    import_hook.add(import_hook.Hook(import_hook.named(_TRAINING), after=wrap))


def _watch_optimizers() -> None:
    """Find out in the first minute that a loop trains and marks no step."""
    stepped = weakref.WeakSet[Any]()

    def before_step(optimizer: Any, *_: Any) -> None:
        assert _GUARD is not None
        if _GUARD.began or _GUARD.stepped or _GUARD.excuse:
            return
        if optimizer not in stepped:  # a loop may call `after_first_step` after its first one
            stepped.add(optimizer)
        elif installed.reached() or any(map(_is_megatrons, optimizer.param_groups)):
            error = _no_step_seen(f"{type(optimizer).__name__} steps a second time, and no step")
            refuse(error)
            raise error

    def watch(module: ModuleType) -> None:
        module.register_optimizer_step_pre_hook(before_step)

    name = "torch.optim.optimizer"
    if name in sys.modules:
        watch(sys.modules[name])
    else:
        import_hook.add(import_hook.Hook(import_hook.named(name), after=watch))


def _is_megatrons(group: dict[str, Any]) -> bool:
    """Whether Megatron's layers have made some of these parameters."""
    return any(hasattr(parameter, "tensor_model_parallel") for parameter in group["params"])


def _no_step_seen(what: str) -> CppmegaError:
    return CppmegaError(
        "no-step-seen",
        f"{where()}: {what} of it was seen.",
        "Neither the imports nor the ranks nor the reached patches were checked.",
        "write `for batch in cppmega.guard.steps(loader, config):`, call "
        "cppmega.guard.after_first_step(config) where the loop is left in its first step, or "
        "pass --no-steps for a script that does not train",
    )


def _around(
    function: Callable[..., Any], before: Callable[[], None], after: Callable[[Any], None]
) -> Callable[..., Any]:
    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        before()
        result = function(*args, **kwargs)
        after(importlib.import_module("megatron.training.global_vars").get_args())
        return result

    return watched


def _pass_to_children(guard: Guard) -> None:
    """Let the processes that this one starts join the same overlay."""
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [folder for folder in known if folder and folder != children.BOOTSTRAP]
    if children.BOOTSTRAP not in sys.path:
        # torch.compile builds its workers' PYTHONPATH from it; the script's folder stays first.
        sys.path.insert(1, children.BOOTSTRAP)
    os.environ["PYTHONPATH"] = os.pathsep.join([children.BOOTSTRAP, *others])
    os.environ[env.OVERLAY.name] = guard.receipt.digest
    os.environ[env.ROOT.name] = str(guard.session.root)
    os.environ[env.PYTHON.name] = children.this_python()
    os.environ[env.GUARDED_BY.name] = ledger.address() or ledger.open_new()
