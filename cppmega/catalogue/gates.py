"""The `CPPMEGA_*` variables: which exist, which are set, and which are misspelled."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from cppmega.catalogue import decisions
from cppmega.errors import CppmegaError, closest, suggestion
from cppmega.host import env
from cppmega.host.containment import contained
from cppmega.page import Page

_OFF = {"", "0", "false", "off", "no"}


def declared(pages: Iterable[Page]) -> set[str]:
    """Every variable that a page or the package declares."""
    names = set(env.NAMES)
    for page in pages:
        names |= {*page.patch.variables, *filter(None, [page.patch.gate])}
    return names


def check(pages: Iterable[Page], environment: Mapping[str, str] = os.environ) -> None:
    """Refuse a variable that nothing declares, or that nothing reads while a gate is closed.

    Raises:
        CppmegaError: `unknown-variable`, with the nearest name; `variable-without-gate`.
    """
    for problem in problems(pages, environment):
        raise problem


def problems(pages: Iterable[Page], environment: Mapping[str, str]) -> Iterator[CppmegaError]:
    """Yield an error for every variable that nothing declares, or that only closed pages read."""
    pages = list(pages)
    known = declared(pages)
    yield from _of_closed_pages(pages, environment)
    for name in sorted(environment):
        if not name.startswith(env.PREFIX) or name in known:
            continue
        row = decisions.of_variable(name)
        yield _declined(name, row) if row is not None else _unknown(name, environment[name], known)


def _of_closed_pages(
    pages: Iterable[Page], environment: Mapping[str, str]
) -> Iterator[CppmegaError]:
    """Yield an error for every variable that is set and belongs only to pages with closed gates."""
    readers: dict[str, list[Page]] = {}
    for page in pages:
        for name in page.patch.variables:
            readers.setdefault(name, []).append(page)
    for name in sorted(readers.keys() & environment.keys() - env.NAMES):
        if environment[name] and not any(is_on(page, environment) for page in readers[name]):
            gate = readers[name][0].patch.gate
            yield CppmegaError(
                "variable-without-gate",
                f"{name} is set, and {gate} is not: {readers[name][0].name}, which reads it, is "
                "off.",
                "The setting would seem to be active, but it has no effect.",
                f"export {gate}=1, then python -m cppmega.apply_patches; or unset {name}",
            )


def _declined(name: str, row: decisions.Decision) -> CppmegaError:
    return CppmegaError(
        "unknown-variable",
        f"{name} is set, and nothing reads it. {row.sentences()}",
        "The switch would seem to be on, but it does nothing.",
        f"unset {name}; {row.instead}; cppmega explain {name}",
    )


def _unknown(name: str, value: str, known: Iterable[str]) -> CppmegaError:
    near = closest(name, known)
    return CppmegaError(
        "unknown-variable",
        f"{name} is set, and nothing reads it."
        + (suggestion(near) if near else " No page declares it."),
        "The switch would seem to be on, but it does nothing.",
        f"unset {name}" + (f"; export {near[0]}={value}" if near else ""),
    )


def is_on(page: Page, environment: Mapping[str, str]) -> bool:
    """Whether the page's gate is open; a page without a gate is always on.

    Raises:
        CppmegaError: `bad-gate-value`.
    """
    if page.patch.gate is None:
        return True
    value = environment.get(page.patch.gate, "").strip().lower()
    if value in env.ON:
        return True
    if value in _OFF:
        return False
    raise CppmegaError(
        "bad-gate-value",
        f"{page.patch.gate}={value!r} is neither on nor off.",
        "A guess would silently turn a patch on or off.",
        f"export {page.patch.gate}=1 (or 0)",
    )


def wanted(page: str, when: Callable[[Any], bool], args: Any) -> bool:
    """Whether a run with these arguments must reach a page, according to the page's `when`.

    Raises:
        CppmegaError: `page-failed`, also if it does not return a bool.
    """

    def failed(what: str) -> CppmegaError:
        return CppmegaError(
            "page-failed",
            f"`when` of {page} {what}.",
            "Without its answer, it is not known whether this run must reach the patch.",
            "correct the page; `when` takes the run's arguments and returns True or False",
        )

    with contained(failed):
        answer = when(args)
    if not isinstance(answer, bool):
        raise failed(f"returns {type(answer).__name__}, not True or False")
    return answer


def values(pages: Iterable[Page], environment: Mapping[str, str]) -> dict[str, str]:
    """Gate -> "1" or "0", as the receipt stores them."""
    return {
        page.patch.gate: "1" if is_on(page, environment) else "0"
        for page in pages
        if page.patch.gate is not None
    }


def check_applied(
    pages: Iterable[Page], applied: Mapping[str, str], environment: Mapping[str, str], where: str
) -> None:
    """Refuse a run whose gates differ from those with which the patches were applied.

    Args:
        applied: the gates in the receipt.
        where: the process whose environment it is.

    Raises:
        CppmegaError: `gate-differs`.
    """
    for name, value in values(pages, environment).items():
        if applied.get(name, "0") != value:
            raise CppmegaError(
                "gate-differs",
                f"{where}: {name} is {value} here and was {applied.get(name, '0')} when "
                "the patches were applied.",
                "The run would not do what its environment requests.",
                f"export {name}={applied.get(name, '0')}, or apply again with {name}={value}",
            )
