"""Calls of Megatron that the kernels of pages compute, and calls that they decline.

Patched code asks `served` whether a page's kernels compute a call; if they do not, it gives the
reason. Megatron's own code, which is what the run has asked not to use, would then run without a
trace of it in any log. Such a call ends the run, unless the user has allowed it
(`--allow-fallback PAGE`, or the recipe's `allow_fallback`), or the run's arguments promised
nothing. A page that leaves some calls to Megatron by design, whatever the arguments, counts them by
`passed`.

Patched Megatron imports this module, which therefore imports neither torch nor Megatron.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from cppmega.errors import CppmegaError, did_you_mean
from cppmega.host import env


class CallDeclinedError(CppmegaError):
    """A call that the kernels of a page were to compute, and do not support."""

    page: str = ""
    reason: str = ""
    shapes: str = ""
    """The tensors of the call, with their shapes and types."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep the fields when pickled, too."""
        return *super().__reduce__(), self.__dict__


class Count(NamedTuple):
    """The calls of one page so far; a captured or compiled call counts once."""

    served: int
    declined: Mapping[str, int]
    """Reason -> calls that Megatron's own code has computed."""


_SERVED: dict[str, int] = {}
_DECLINED: dict[str, dict[str, int]] = {}
_judge: Callable[[CallDeclinedError], bool] | None = None


def served(page: str, reason: str | None = None, **given: Any) -> bool:
    """Count a call, and return whether the page's kernels compute it.

    Args:
        page: the page.
        reason: why its kernels do not support the call, as a clause; None if they do.
        given: the tensors of the call, for the error.

    Raises:
        CallDeclinedError: `call-declined`, unless Megatron's own code may compute the call.
    """
    if reason is None:
        _count(page)
        return True
    _decline(page, reason, **given)
    return False


def passed(page: str, reason: str) -> None:
    """Count a call that the page leaves to other code by design."""
    declined = _DECLINED.setdefault(page, {})
    declined[reason] = declined.get(reason, 0) + 1


def _count(page: str) -> None:
    _SERVED[page] = _SERVED.get(page, 0) + 1


def _decline(page: str, reason: str, **given: Any) -> None:
    passed(page, reason)
    if page not in allowed():
        error = _declined(page, reason, given)
        if (_judge or _trains)(error):
            raise error
    warnings.warn(f"{page}: Megatron's own code computes a call, because {reason}", stacklevel=3)


for _each in (_count, passed, _decline):
    # Dynamo calls them while tracing, and leaves no trace of them in the graph. This is all that
    # `torch.compiler.assume_constant_result` does.
    vars(_each)["_dynamo_marked_constant"] = True


def _declined(page: str, reason: str, given: Mapping[str, Any]) -> CallDeclinedError:
    shapes = ", ".join(
        f"{name} {list(one.shape)} in {str(one.dtype).removeprefix('torch.')}"
        for name, one in given.items()
        if hasattr(one, "shape")
    )
    error = CallDeclinedError(
        "call-declined",
        f"The kernels of {page} do not compute a call, because {reason}"
        f"{f' ({shapes})' if shapes else ''}.",
        "Megatron's own code would compute it, at its own cost in time and memory, in a run that "
        "is recorded as one with the patch.",
        f"change what the reason names; or `python -m cppmega.apply_patches --without {page}`; or "
        f"--allow-fallback {page} (in a recipe, allow_fallback), which the log and the digest of "
        f"the run state (without cppmega.run: export CPPMEGA_ALLOW_FALLBACK={page})",
    )
    error.page, error.reason, error.shapes = page, reason, shapes
    return error


def _trains(error: CallDeclinedError) -> bool:
    """Whether this process, which no guard watches, is training: inference may decline calls."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return False
    return bool(torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1)


def judged_by(judge: Callable[[CallDeclinedError], bool] | None) -> None:
    """Let a function decide whether a declined call ends the run; None: the grad mode decides."""
    global _judge
    _judge = judge


def counts() -> dict[str, Count]:
    """The calls of this process so far, by page."""
    pages = sorted({*_SERVED, *_DECLINED})
    return {page: Count(_SERVED.get(page, 0), dict(_DECLINED.get(page, {}))) for page in pages}


def summary(ranks: Iterable[Mapping[str, Count]]) -> str:
    """The calls of all ranks, for a log; empty if there were none."""
    served: dict[str, int] = {}
    declined: dict[str, dict[str, int]] = {}
    for rank in ranks:
        for page, count in rank.items():
            served[page] = served.get(page, 0) + count.served
            reasons = declined.setdefault(page, {})
            for reason, calls in count.declined.items():
                reasons[reason] = reasons.get(reason, 0) + calls
    return ", ".join(_row(page, served[page], declined[page]) for page in sorted(served))


def _row(page: str, served: int, declined: Mapping[str, int]) -> str:
    reasons = ", ".join(f"{calls} declined: {reason}" for reason, calls in declined.items())
    return f"{page} {served}{f' ({reasons})' if reasons else ''}"


def allowed(
    environ: Mapping[str, str] = os.environ, further: Iterable[str] = ()
) -> tuple[str, ...]:
    """The pages whose calls Megatron's own code may compute, in alphabetical order.

    Args:
        environ: the environment of the process that calls.
        further: pages that the command line or the recipe allows, too.
    """
    return tuple(sorted({*env.ALLOW_FALLBACK.read(environ), *further}))


def allow(pages: Iterable[str]) -> None:
    """Allow further pages in this process and, through its environment, in its children."""
    if every := allowed(further=pages):
        os.environ[env.ALLOW_FALLBACK.name] = ",".join(every)


def check_allowed(known: Collection[str], names: Iterable[str] | None = None) -> None:
    """Refuse the names of pages that do not exist.

    Args:
        known: the pages.
        names: those that are allowed; None: those of this process.

    Raises:
        CppmegaError: `unknown-page`.
    """
    for name in allowed() if names is None else names:
        if name not in known:
            raise CppmegaError(
                "unknown-page",
                f"--allow-fallback, CPPMEGA_ALLOW_FALLBACK or the recipe's field allow_fallback "
                f"names {name}, which is not a page." + did_you_mean(name, known),
                "The page that was meant would end the run at its first declined call.",
                "cppmega list shows the pages",
            )


@contextmanager
def allowing(*pages: str) -> Iterator[None]:
    """Allow calls of pages to be declined, as a proof does that compares both ways."""
    before = os.environ.get(env.ALLOW_FALLBACK.name)
    allow(pages)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(env.ALLOW_FALLBACK.name, None)
        else:
            os.environ[env.ALLOW_FALLBACK.name] = before
