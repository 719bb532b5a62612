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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from cppmega import (
    accepted,
    gates,
    imported,
    marks,
    overlay,
    provenance,
    receipt,
    runtime,
    witness,
)
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

_FIRST_STEP = ("startup", "forward", "backward")


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
    witness.install()
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
    problem = ""
    try:
        imported.check(_GUARD.session.tree.root, _GUARD.receipt, _GUARD.edits)
        runtime.check()
    except CppmegaError as error:
        problem = f"{error.name}: {error.what} {error.why}"
    mine = (where(), _GUARD.receipt.digest, problem)
    everyone: list[tuple[str, str, str]] = gather(mine)
    broken = [f"{place}: {said}" for place, _, said in everyone if said]
    if broken:
        raise CppmegaError(
            "rank-not-whole",
            "; ".join(broken[:8]),
            "One rank with other code is enough to train a wrong model.",
            "on that host: `cppmega status`, then `python -m cppmega.apply_patches`",
        )
    digests = {digest for _, digest, _ in everyone}
    if len(digests) > 1:
        said = ", ".join(f"{place} has {digest}" for place, digest, _ in everyone)
        raise CppmegaError(
            "overlay-differs",
            f"The ranks hold {len(digests)} overlays: {said}.",
            "They would train different code.",
            "run `python -m cppmega.apply_patches` with one version of cppmega on every host",
        )
    provenance.check(_GUARD.session.tree.root, _GUARD.receipt, where(), gather)
    _GUARD.began = True


def after_first_step(args: Any = None) -> None:
    """Stop the run when a page that had to be reached was reached on no rank.

    Raises:
        CppmegaError: `page-not-reached`, on every rank.
    """
    if _GUARD is None or _GUARD.stepped:
        return
    required = _required(args, _FIRST_STEP)
    reached = set().union(*gather(marks.reached()))
    _refuse_missing(required - reached, "the first step")
    _GUARD.stepped = True
    if _rank() == 0:
        print(summary(reached), file=sys.stderr, flush=True)


def after_first_log(args: Any = None) -> None:
    """The same for pages that are reached when Megatron counts and logs what a step did."""
    _after_first("log", "the first log", args)


def after_first_save(args: Any = None) -> None:
    """The same for pages that are reached when a checkpoint is saved."""
    _after_first("save", "the first checkpoint", args)


def _after_first(phase: str, said: str, args: Any) -> None:
    if _GUARD is None or phase in _GUARD.ended:
        return
    reached = set().union(*gather(marks.reached()))
    _refuse_missing(_required(args, (phase,)) - reached, said)
    _GUARD.ended.add(phase)


def finish() -> None:
    """When the script has ended: a run whose steps nobody saw was not checked.

    Raises:
        CppmegaError: `no-step-seen`.
    """
    if _GUARD is None or _GUARD.stepped or "megatron.core" not in sys.modules:
        return
    raise CppmegaError(
        "no-step-seen",
        f"{where()}: the script ended, and no step of it was seen.",
        "Neither the imports nor the ranks nor the reached patches were checked.",
        "write `for batch in cppmega.guard.steps(loader, args):`, or pass --no-steps for a script "
        "that does not train",
    )


def summary(reached: set[str]) -> str:
    """One line for the log: what this run trains with."""
    assert _GUARD is not None
    hit = sorted(reached & set(_GUARD.receipt.pages))
    idle = [f"{name} ({why})" for name, why in sorted(_GUARD.idle.items()) if name not in reached]
    name = accepted.name_of_code(_GUARD.receipt.digest, accepted.in_this_process())
    text = f"cppmega: overlay {name}; reached: {', '.join(hit) or 'none'}"
    text += f"; idle: {', '.join(idle)}" if idle else ""
    return f"{text}; imported: {provenance.summary()}"


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


def _required(args: Any, phases: Iterable[str]) -> set[str]:
    """Pages that this run must have passed through by now; the others become idle."""
    assert _GUARD is not None
    required = set()
    for name in _GUARD.receipt.pages:
        patch = _GUARD.session.pages[name].patch
        if patch.reached == "never":
            _GUARD.idle[name] = "no run need reach it"
        elif patch.reached not in phases:
            _GUARD.idle.setdefault(name, f"reached at {patch.reached}")
        elif patch.when is not None and args is None:
            _GUARD.idle[name] = "the loop gave no arguments to decide by"
        elif patch.when is not None and not patch.when(args):
            _GUARD.idle[name] = "this run's arguments do not use it"
        else:
            required.add(name)
            _GUARD.idle.pop(name, None)
    return required


def _refuse_missing(missing: set[str], when: str) -> None:
    assert _GUARD is not None
    if not missing:
        return
    said = ", ".join(
        f"{name} ({', '.join(_GUARD.receipt.pages[name].targets)})" for name in sorted(missing)
    )
    raise CppmegaError(
        "page-not-reached",
        f"{where()}: no rank went through {said} by {when}.",
        "The patch is on disk and does nothing: the run would train without it.",
        "see `cppmega explain NAME`; a run that does not need it takes it out with "
        "`cppmega revert NAME`",
    )


def _watch_megatron() -> None:
    """Find Megatron's steps and checkpoints without the script's help."""
    import wrapt

    wrapt.register_post_import_hook(_watch_training, "megatron.training.training")


def _watch_training(module: Any) -> None:
    # train() looks these names up in its own module, so replacing them there is enough.
    module.train_step = _around(module.train_step, before_first_step, after_first_step)
    module.training_log = _around(module.training_log, _nothing, after_first_log)
    module.save_checkpoint = _around(module.save_checkpoint, _nothing, after_first_save)


def _nothing() -> None:
    """Before a log or a checkpoint there is nothing to check."""


def _around(
    function: Callable[..., Any], before: Callable[[], None], after: Callable[[Any], None]
) -> Callable[..., Any]:
    import functools
    import importlib

    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        before()
        result = function(*args, **kwargs)
        after(importlib.import_module("megatron.training.global_vars").get_args())
        return result

    return watched


def _pass_on(guard: Guard) -> None:
    """Let processes that this one starts join the same overlay."""
    folder = str(Path(__file__).parent / "bootstrap")
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if folder not in known:
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, known)])
    os.environ[OVERLAY] = guard.receipt.digest
    os.environ[ROOT] = str(guard.session.root)
