"""`cppmega port`: carry pins over to a new text, and list the pages that somebody has to read.

A page is carried over if its edit fits the new text, upstream changed none of the statements that
the edit replaces, and every law and the proof hold there. The rest is a list of work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from cppmega.authoring import drift_report
from cppmega.authoring.drift_result import Drift, PageDrift
from cppmega.authoring.pin import Pinned
from cppmega.errors import CppmegaError
from cppmega.page import Page


@dataclass(frozen=True, slots=True)
class Ported:
    """One page that does not serve NEW yet."""

    drift: PageDrift
    seconds: float = 0.0
    """How long its laws and its proof took."""
    pinned: Pinned | None = None
    problem: CppmegaError | None = None
    """Why it could not be pinned; None if that was not tried."""

    def as_json(self, comparison: Drift) -> dict[str, Any]:
        """One entry of `patches` in the JSON answer."""
        todo, command = ("", "") if self.pinned else drift_report.advice(self.drift, comparison)
        if self.problem is not None:
            todo, command = self.problem.what, self.problem.next
        return {
            "name": self.drift.page.name,
            "change": self.drift.word,
            "pinned": self.pinned.added if self.pinned else {},
            "seconds": round(self.seconds, 1),
            "targets": msgspec.to_builtins(self.drift.targets),
            "todo": todo,
            "next": command,
        }


def carries_over(page: PageDrift) -> bool:
    """Whether a page is to be pinned: its edit fits the new text, and means there what it did."""
    unknown = [target for target in page.targets if not target.known]
    return (
        page.word == "changed"
        and not page.safe
        and all(
            target.word in ("same", "left")
            or (
                target.word == "changed"
                and target.fits is True
                and all(change.meets in ("elsewhere", "beside") for change in target.changes)
            )
            for target in unknown
        )
    )


def port(pages: Iterable[PageDrift], pin: Callable[[Page], Pinned]) -> Iterator[Ported]:
    """Pin the pages that carry over, and yield those and the rest.

    Args:
        pages: the result of a comparison.
        pin: checks the laws and the proof of a page on NEW, and writes its pin.
    """
    for page in pages:
        if page.safe:
            continue
        if not carries_over(page):
            yield Ported(page)
            continue
        begun = time.monotonic()
        pinned, problem = None, None
        try:
            pinned = pin(page.page)
        except CppmegaError as error:
            problem = error
        yield Ported(page, time.monotonic() - begun, pinned, problem)


def lines(one: Ported, comparison: Drift) -> Iterator[str]:
    """Yield the lines of the report about one page."""
    name = one.drift.page.name
    if one.pinned is not None:
        yield f"{'pinned':<15} {name}  laws and proof hold, {one.seconds:.0f} s"
    else:
        yield f"{one.drift.word:<15} {name}  {drift_report.summary(one.drift, comparison)}"
    for target in one.drift.targets:
        yield from drift_report.target_lines(target, one.drift)
    row = one.as_json(comparison)
    if row["todo"]:
        yield f"    to do: {row['todo']}"
    if row["next"]:
        yield f"    next:  {row['next']}"
