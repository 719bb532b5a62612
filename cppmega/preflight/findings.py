"""What a check of the preflight answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from cppmega.errors import CppmegaError

State = Literal["ok", "failed", "not-applicable", "not-run"]


class NotApplicable(Exception):  # noqa: N818  (an answer, not an error)
    """There is nothing to check here; the message says why."""


class Refused(Exception):  # noqa: N818
    """Several things are wrong at once: a user wants to know all of them."""

    def __init__(self, errors: Iterable[CppmegaError]) -> None:
        self.errors = tuple(errors)
        super().__init__("; ".join(map(str, self.errors)))


def refuse(errors: Iterable[CppmegaError]) -> None:
    """Raise the problems of a check; returns where there are none.

    Raises:
        Refused: there is at least one.
    """
    problems = tuple(errors)
    if problems:
        raise Refused(problems)


class Remark(str):
    """Detail of a check that holds, printed even where all is well."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer of one check; a check with several problems has several findings."""

    check: str
    state: State
    name: str = ""
    """Of the error, kebab-case; empty unless `failed`."""
    what: str = ""
    """What happened; or the detail of a check that holds, or why there was nothing to check."""
    why: str = ""
    next: str = ""

    @property
    def is_remark(self) -> bool:
        """Whether the check holds and its detail is printed all the same."""
        return isinstance(self.what, Remark)

    @property
    def error(self) -> CppmegaError:
        """A failure as the exception that stops a launch."""
        return CppmegaError(self.name, self.what, self.why, self.next)

    def as_json(self) -> dict[str, str]:
        """One entry of `checks` in the JSON answer."""
        return {
            "check": self.check,
            "state": self.state,
            "name": self.name,
            "what": self.what,
            "why": self.why,
            "next": self.next,
        }
