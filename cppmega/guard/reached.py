"""The pages that a run must have reached by a phase, and the errors if it has not."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from cppmega import calls
from cppmega.catalogue import gates
from cppmega.errors import CppmegaError
from cppmega.guard import allowed, files, given, installed, rules
from cppmega.guard.held import Guard
from cppmega.guard.swaps import module_name
from cppmega.host import env
from cppmega.host.wording import counted as patches
from cppmega.tree import accepted

FIRST_STEP = ("startup", "forward", "backward")

_CALLS = {"log": "after_first_log", "save": "after_first_save"}


class Seen(NamedTuple):
    """The pages of a process, or of all ranks together."""

    reached: frozenset[str]
    """Its code has passed through them."""
    imported: frozenset[str]
    """It has imported some of the code that shows so."""


NOTHING = Seen(frozenset(), frozenset())


def here(guard: Guard) -> Seen:
    """The pages that this process has reached, and those that it could have."""
    imported = (
        name
        for name in guard.receipt.pages
        if any(sys.modules.get(module_name(path)) is not None for path in _marked(guard, name))
    )
    return Seen(frozenset(installed.reached()), frozenset(imported))


def together(ranks: Iterable[Seen]) -> Seen:
    """The pages of all ranks."""
    reached, imported = zip(*ranks, strict=True)
    return Seen(frozenset().union(*reached), frozenset().union(*imported))


def required(guard: Guard, args: Any, phases: Iterable[str], seen: Seen) -> set[str]:
    """The pages that this run must have reached by these phases; the others become idle.

    Raises:
        CppmegaError: `arguments-not-given`.
    """
    wanted, undecided = set(), dict[str, set[str]]()
    args = given.Given() if args is None else args
    for name in guard.receipt.pages:
        patch = guard.session.pages[name].patch
        if patch.reached == "never":
            guard.idle[name] = "no run has to reach it"
            continue
        if patch.reached not in phases:
            guard.idle.setdefault(name, f"reached at {patch.reached}")
            continue
        uses = name in seen.reached or _uses(guard, name, args)
        if isinstance(args, given.Given) and name not in seen.imported:
            paths = _marked(guard, name)
            if uses is not True or patch.when is None or all(map(_of_megatrons_loop, paths)):
                uses = False
        if isinstance(uses, set):
            undecided[name] = uses
        elif uses:
            wanted.add(name)
            guard.idle.pop(name, None)
        else:
            guard.idle[name] = "this run's arguments do not use it"
    _refuse_undecided(undecided, tuple(phases))
    return wanted


def _uses(guard: Guard, name: str, args: Any) -> bool | set[str]:
    """Whether a run uses a page, or the arguments that it would have to give to tell."""
    when = guard.session.pages[name].patch.when
    if when is None:
        return True
    if not isinstance(args, given.Given):
        return gates.wanted(name, when, args)
    return args.answer(lambda asked: gates.wanted(name, when, asked))


def _marked(guard: Guard, name: str) -> list[str]:
    """The files whose code shows that a page is reached."""
    patch = guard.session.pages[name].patch
    return [edit.path for edit in guard.edits.get(name, ()) if patch.marks(edit)]


def _of_megatrons_loop(path: str) -> bool:
    return path.startswith("megatron/training/")


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
    args = rules.arguments_of(guard)
    if page in guard.wanted or page not in guard.session.pages or args is None:
        return True
    if page not in guard.promised:  # a page is asked once: that takes longer than a call
        guard.promised[page] = bool(_uses(guard, page, args))
    return guard.promised[page]


def summary(guard: Guard, reached: Collection[str], counted: str = "") -> str:
    """Two lines for the log: the overlay that this run trains with, and what it has called.

    Args:
        guard: the guard of this process.
        reached: the pages that some rank has reached.
        counted: the calls of kernels, of all ranks.
    """
    hit, idle = _hit(guard, reached), _idle(guard, reached)
    wrapped = [f"{name} by {key}" for name, key in sorted(allowed.met().items())]
    code = accepted.name_of_code(guard.receipt.digest, accepted.in_this_process(), calls.allowed())
    where = "" if env.VERBOSE.read() else f" ({env.VERBOSE.name}=1 names them)"
    text = f"cppmega: overlay {code}; {patches(len(hit), 'patch', 'patches')} reached, "
    text += f"{len(idle)} idle{where}\ncppmega: imported: {files.last().summary()}"
    text += f"; kernel calls: {counted}" if counted else ""
    return text + (f"; vouched wrappers: {', '.join(wrapped)}" if wrapped else "")


def names(guard: Guard, reached: Collection[str]) -> str:
    """Two lines that name the pages that some rank has reached, and those that need not be."""
    hit, idle = _hit(guard, reached), _idle(guard, reached)
    return f"reached: {', '.join(hit) or 'none'}\nidle: {', '.join(idle) or 'none'}"


def _hit(guard: Guard, reached: Collection[str]) -> list[str]:
    return sorted({*reached} & set(guard.receipt.pages))


def _idle(guard: Guard, reached: Collection[str]) -> list[str]:
    return [f"{name} ({why})" for name, why in sorted(guard.idle.items()) if name not in reached]


def _refuse_undecided(undecided: dict[str, set[str]], phases: tuple[str, ...]) -> None:
    if not undecided:
        return
    call = next((_CALLS[phase] for phase in phases if phase in _CALLS), "steps")
    names, how = given.ways(set().union(*undecided.values()))
    pages = ", ".join(sorted(undecided)[:2])
    pages += f" and {len(undecided) - 2} more" if len(undecided) > 2 else ""
    raise CppmegaError(
        "arguments-not-given",
        f"cppmega.guard.{call} was not given {names}. Whether this run must reach {pages} depends "
        "on it, and no rank has reached them.",
        "The patches may have no effect in a run that needs them.",
        f"cppmega.guard.{call}({'loader, ' if call == 'steps' else ''}...) takes configurations, "
        f"Megatron's parsed arguments, or dicts with their names; give it {how}, too",
    )
