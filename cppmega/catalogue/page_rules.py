"""The rules that pages add to those of every run, and what pages provide for rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cppmega.errors import CppmegaError
from cppmega.host.containment import contained
from cppmega.page import Page
from cppmega.rules import RULES
from cppmega.rules.rule import Run, errors


def provided(pages: Iterable[Page], name: str) -> tuple[Any, ...]:
    """The values that these pages provide under a name, in the order of the pages."""
    return tuple(value for page in pages for value in page.patch.provides.get(name, ()))


@dataclass(frozen=True, slots=True)
class ProvidedBy:
    """What pages provide: those in the code, and those that are not."""

    present: tuple[Page, ...]
    absent: tuple[Page, ...]

    def inside(self, name: str) -> tuple[Any, ...]:
        """The values that pages in the code provide under a name."""
        return provided(self.present, name)

    def outside(self, name: str) -> Mapping[str, tuple[Any, ...]]:
        """The pages that would provide something under a name and are not in the code."""
        would = {page.name: page.patch.provides.get(name, ()) for page in self.absent}
        return {page: values for page, values in would.items() if values}


def broken(pages: Iterable[Page], run: Run) -> list[CppmegaError]:
    """The errors of the rules that a run breaks.

    Args:
        pages: those in the code, whose rules hold for it, too.
        run: what is known of it.
    """
    all_errors = list(errors(RULES, run))
    for page in pages:
        if page.patch.rules:
            all_errors += _of_page(page, run)
    return all_errors


def _of_page(page: Page, run: Run) -> list[CppmegaError]:
    """The rules of one page; a fault of the page is an error, too."""

    def failed(what: str) -> CppmegaError:
        return CppmegaError(
            "page-failed",
            f"A rule of {page.name} {what}.",
            "Whether the page supports this run is not known.",
            "correct the page; `when` of a rule gets a run, and returns whether it is broken",
        )

    with contained(failed):
        return list(errors(page.patch.rules, run))
