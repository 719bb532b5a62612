"""Inside the process that trains: is what we import what was applied, on every rank.

`python -m cppmega.run SCRIPT` starts the guard. Megatron's `train_step` is watched without the
script's help; a loop of one's own says where its steps are:

    from cppmega import guard
    for batch in guard.steps(loader, args):
        ...
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from cppmega import gates, imported, marks, overlay, reached, receipt, runtime, training_watch
from cppmega.errors import CppmegaError
from cppmega.overlay import Session
from cppmega.page import Edit
from cppmega.receipt import Receipt
from cppmega.result import overlay_digest

T = TypeVar("T")

OVERLAY = "CPPMEGA_OVERLAY"
"""Set for child processes: the digest they must hold."""
ROOT = "CPPMEGA_ROOT"
"""Set for child processes: the tree they must import megatron from."""


@dataclass
class Guard:
    """What this process must hold."""

    session: Session
    receipt: Receipt
    edits: dict[str, tuple[Edit, ...]]
    began: bool = False
    stepped: bool = False
    ended: set[str] = field(default_factory=set)
    """Later phases that were checked: log, save."""
    idle: dict[str, str] = field(default_factory=dict)
    """Pages that this run need not reach -> the reason."""


_GUARD: Guard | None = None


def active() -> Guard | None:
    """The guard of this process, None where the script runs without `cppmega.run`."""
    return _GUARD


def start(root: Path | None = None) -> Guard:
    """Check the tree, arm the runtime patches, watch for Megatron's first step.

    Args:
        root: the tree that `megatron` must come from; None: the one Python would import.

    Raises:
        CppmegaError: `no-receipt`, `overlay-not-whole`, `gate-differs`, `too-late` and whatever
            is wrong with the tree.
    """
    global _GUARD
    if root is not None:
        imported.only_from(root)
    session = Session(root)
    loaded = receipt.load(session.tree)
    gates.check(session.pages.values())
    if not loaded.exists or loaded.problem:
        raise CppmegaError(
            "no-receipt",
            f"{where()}: {loaded.problem or 'no patches were applied'} in {session.root}.",
            "Nothing proves that the patches are in the code that trains.",
            "python -m cppmega.apply_patches",
        )
    if not os.environ.get(OVERLAY):  # a child process inherits its parent's answer
        gates.check_applied(session.pages.values(), loaded.receipt.gates, os.environ, where())
    plan = session.plan(None, {**os.environ, **loaded.receipt.gates})
    wrong = [v for v in plan.verdicts.values() if v.state in overlay.NOT_WHOLE]
    if wrong or overlay_digest(loaded.receipt) != loaded.receipt.digest:
        said = "; ".join(f"{v.name} is {v.state} ({v.target}) {v.detail}" for v in wrong)
        raise CppmegaError(
            "overlay-not-whole",
            f"{where()}: {said or 'the receipt was changed by hand'}.",
            "This rank would train other code than the receipt says.",
            wrong[0].next or "python -m cppmega.apply_patches"
            if wrong
            else "python -m cppmega.apply_patches",
        )
    _GUARD = Guard(session, loaded.receipt, plan.edits)
    imported.watch(session.tree.root, loaded.receipt, plan.edits)
    for name in loaded.receipt.pages:
        runtime.arm(session.pages[name], plan.edits[name])
    _watch_megatron()
    _pass_on(_GUARD)
    return _GUARD


def join_or_die() -> None:
    """In a child process: hold the same overlay as the parent, or end with the reason."""
    if not os.environ.get(OVERLAY):
        return
    try:
        guard = start(Path(os.environ[ROOT]))
        if guard.receipt.digest != os.environ[OVERLAY]:
            raise CppmegaError(
                "overlay-differs",
                f"{where()}: this child process finds overlay {guard.receipt.digest}, "
                f"its parent holds {os.environ[OVERLAY]}.",
                "Workers and trainer would run different code.",
                "let nobody patch the tree while a run is under way",
            )
        guard.began = guard.stepped = True  # a worker has no steps of its own
    except CppmegaError as error:
        print(error.render(), file=sys.stderr, flush=True)
        os._exit(1)  # site would print any exception and go on


def steps(batches: Iterable[T], args: Any = None) -> Iterator[T]:
    """Iterate a loop of one's own, checked before its first step and after it.

    Args:
        batches: what the loop iterates over.
        args: the run's arguments, for pages that are reached only with some of them.
    """
    if _GUARD is None:
        print("cppmega: not guarded; start with `python -m cppmega.run`", file=sys.stderr)
        yield from batches
        return
    before_first_step()
    for batch in batches:
        yield batch
        after_first_step(args)


def before_first_step() -> None:
    """Compare this process with the receipt, and all ranks with each other. Costs nothing later.

    Raises:
        CppmegaError: on every rank, when one of them is not as it must be.
    """
    if _GUARD is None or _GUARD.began:
        return
    everyone = gather((where(), _GUARD.receipt.digest, _problem()))
    _refuse_broken([(place, problem) for place, _, problem in everyone])
    digests = {digest for _, digest, _ in everyone}
    if len(digests) > 1:
        said = ", ".join(f"{place} has {digest}" for place, digest, _ in everyone)
        raise CppmegaError(
            "overlay-differs",
            f"The ranks hold {len(digests)} overlays: {said}.",
            "They would train different code.",
            "run `python -m cppmega.apply_patches` with one version of cppmega on every host",
        )
    _GUARD.began = True


def recheck(when: str, *, together: bool = False) -> None:
    """Compare this process with the receipt once more.

    Args:
        when: for the message, as in "at the end of the run".
        together: every rank takes part, and all of them stop when one is not as it must be; only
            where every rank is certain to call it.

    Raises:
        CppmegaError: `rank-not-whole`.
    """
    if _GUARD is None:
        return
    mine = (f"{where()}, {when}", _problem())
    _refuse_broken(gather(mine) if together else [mine])


def _problem() -> tuple[str, str] | None:
    """What is not as it must be in this process, and what to do about it."""
    assert _GUARD is not None
    try:
        imported.check(_GUARD.session.tree.root, _GUARD.receipt)
        runtime.check()
    except CppmegaError as error:
        return f"{error.name}: {error.what} {error.why}", error.next
    return None


def _refuse_broken(everyone: list[tuple[str, tuple[str, str] | None]]) -> None:
    broken = [(place, problem) for place, problem in everyone if problem is not None]
    if broken:
        raise CppmegaError(
            "rank-not-whole",
            "; ".join(f"{place}: {what}" for place, (what, _) in broken[:8]),
            "One rank with other code is enough to train a wrong model.",
            f"on that host: {broken[0][1][1]}",
        )


def after_first_step(args: Any = None) -> None:
    """Stop the run when a page that had to be reached was reached on no rank.

    Raises:
        CppmegaError: `page-not-reached`, `arguments-not-given`, `rank-not-whole`; on every rank.
    """
    if _GUARD is None or _GUARD.stepped:
        return
    everyone = gather((where(), _problem(), marks.reached()))
    _refuse_broken([(f"{place}, after the first step", problem) for place, problem, _ in everyone])
    hit = set().union(*(pages for _, _, pages in everyone))
    required = reached.required(_GUARD, args, reached.FIRST_STEP, hit)
    reached.refuse_missing(_GUARD, required - hit, where(), "the first step")
    _GUARD.stepped = True
    if _rank() == 0:
        print(reached.summary(_GUARD, hit), file=sys.stderr, flush=True)


def after_first_log(args: Any = None) -> None:
    """The same for pages that are reached when Megatron counts and logs what a step did."""
    _after_first("log", "the first log", args)


def after_first_save(args: Any = None) -> None:
    """The same for pages that are reached when a checkpoint is saved.

    A loop of one's own calls it on every rank after each checkpoint: the code is compared each
    time.
    """
    recheck("after a checkpoint", together=True)
    _after_first("save", "the first checkpoint", args)


def _after_first(phase: str, said: str, args: Any) -> None:
    if _GUARD is None or phase in _GUARD.ended:
        return
    hit = set().union(*gather(marks.reached()))
    required = reached.required(_GUARD, args, (phase,), hit)
    reached.refuse_missing(_GUARD, required - hit, where(), said)
    _GUARD.ended.add(phase)


def finish() -> None:
    """When the script has ended: a run whose steps nobody saw was not checked.

    Raises:
        CppmegaError: `no-step-seen`, `rank-not-whole`.
    """
    if _GUARD is None or "megatron.core" not in sys.modules:
        return
    if _GUARD.stepped:
        recheck("at the end of the run")
        return
    raise CppmegaError(
        "no-step-seen",
        f"{where()}: the script ended, and no step of it was seen.",
        "Neither the imports nor the ranks nor the reached patches were checked.",
        "write `for batch in cppmega.guard.steps(loader, args):`, or pass --no-steps for a script "
        "that does not train",
    )


def where() -> str:
    """`host NAME, rank N`."""
    return f"host {socket.gethostname()}, rank {_rank()}"


def gather(mine: T) -> list[T]:
    """The same object of every rank; a list of one where nothing is distributed."""
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return [mine]
    everyone: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, mine)
    return everyone


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _watch_megatron() -> None:
    """Find Megatron's steps, logs and checkpoints without the script's help."""
    training_watch.install(
        {
            "train_step": (before_first_step, after_first_step),
            "training_log": (training_watch.nothing, after_first_log),
            # Before it is written: a checkpoint of other code must not replace a good one.
            "save_checkpoint": (
                lambda: recheck("before a checkpoint", together=True),
                lambda args: _after_first("save", "the first checkpoint", args),
            ),
        }
    )


def _pass_on(guard: Guard) -> None:
    """Let processes that this one starts join the same overlay."""
    folder = str(Path(__file__).parent / "bootstrap")
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if folder not in known:
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, known)])
    os.environ[OVERLAY] = guard.receipt.digest
    os.environ[ROOT] = str(guard.session.root)
