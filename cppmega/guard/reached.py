"""The pages that a run must have reached by a phase, and the errors if it has not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cppmega import calls
from cppmega.catalogue import gates
from cppmega.errors import CppmegaError
from cppmega.guard import allowed, files, rules
from cppmega.guard.held import Guard
from cppmega.tree import accepted

FIRST_STEP = ("startup", "forward", "backward")

_CALLS = {
    "log": "cppmega.guard.after_first_log(args)",
    "save": "cppmega.guard.after_first_save(args)",
}
_LOOP = "for batch in cppmega.guard.steps(loader, args):"


def required(guard: Guard, args: Any, phases: Iterable[str], reached: set[str]) -> set[str]:
    """The pages that this run must have reached by these phases; the others become idle.

    Raises:
        CppmegaError: `arguments-not-given`.
    """
    wanted, undecided = set(), set()
    for name in guard.receipt.pages:
        patch = guard.session.pages[name].patch
        if patch.reached == "never":
            guard.idle[name] = "no run has to reach it"
        elif patch.reached not in phases:
            guard.idle.setdefault(name, f"reached at {patch.reached}")
        elif patch.when is not None and args is None:
            undecided.add(name)
        elif patch.when is not None and not gates.wanted(name, patch.when, args):
            guard.idle[name] = "this run's arguments do not use it"
        else:
            wanted.add(name)
            guard.idle.pop(name, None)
    _refuse_undecided(undecided - reached, tuple(phases))
    return wanted


def refuse_missing(guard: Guard, missing: set[str], place: str, when: str) -> None:
    """Refuse a run in which pages that had to be reached were not reached on any rank.

    Raises:
        CppmegaError: `page-not-reached`.
    """
    if not missing:
        return
    names = ", ".join(
        f"{name} ({', '.join(guard.receipt.pages[name].targets)})" for name in sorted(missing)
    )
    raise CppmegaError(
        "page-not-reached",
        f"{place}: no rank has reached {names} by {when}.",
        "The patch is on disk and has no effect: the run would train without it.",
        "see `cppmega explain NAME`; if the run does not need the patch, remove it with "
        "`cppmega revert NAME`",
    )


def is_promised(guard: Guard, page: str) -> bool:
    """Whether the run relies on a page: its recipe wants it, or its arguments use it.

    A page without a condition is used by every run, and so is one where the arguments are unknown.
    """
    args = guard.arguments
    if args is None:
        args = rules.megatrons_arguments()
    known = guard.session.pages.get(page)
    when = known.patch.when if known is not None else None
    if page in guard.wanted or when is None or args is None:
        return True
    if page not in guard.promised:  # a page is asked once: that takes longer than a call
        guard.promised[page] = gates.wanted(page, when, args)
    return guard.promised[page]


def summary(guard: Guard, reached: set[str], counted: str = "") -> str:
    """One line for the log: the overlay that this run trains with.

    Args:
        guard: the guard of this process.
        reached: the pages that some rank has reached.
        counted: the calls of kernels, of all ranks.
    """
    hit = sorted(reached & set(guard.receipt.pages))
    idle = [f"{name} ({why})" for name, why in sorted(guard.idle.items()) if name not in reached]
    wrapped = [f"{name} by {key}" for name, key in sorted(allowed.met().items())]
    code = accepted.name_of_code(guard.receipt.digest, accepted.in_this_process(), calls.allowed())
    text = f"cppmega: overlay {code}; reached: {', '.join(hit) or 'none'}"
    text += f"; kernel calls: {counted}" if counted else ""
    text += f"; idle: {', '.join(idle)}" if idle else ""
    text += f"; vouched wrappers: {', '.join(wrapped)}" if wrapped else ""
    return f"{text}; imported: {files.summary()}"


def _refuse_undecided(names: set[str], phases: tuple[str, ...]) -> None:
    if not names:
        return
    call = next((_CALLS[phase] for phase in phases if phase in _CALLS), _LOOP)
    raise CppmegaError(
        "arguments-not-given",
        f"Whether this run must reach {', '.join(sorted(names))} depends on its arguments, which "
        "the loop has not passed; no rank has reached it.",
        "The patch may have no effect in a run that needs it.",
        f"`{call}`, where args has the names of Megatron's arguments",
    )
