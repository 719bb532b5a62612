"""The answers that a preflight check can give."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from cppmega.errors import CppmegaError

CheckState = Literal["ok", "failed", "not-applicable", "not-run"]


class NotApplicable(Exception):  # noqa: N818  (an answer, not an error)
    """There is nothing to check; the message states the reason."""

    state: CheckState = "not-applicable"


class NotRun(NotApplicable):
    """Part of a check waits for another check, which the message names; the rest of it holds."""

    state = "not-run"


Problems = Generator[CppmegaError, None, str]
"""The answer of a check that may find several problems: it yields each, so that the user sees all
of them, and returns a line of detail, which is read where it has found none."""


class Remark(str):
    """Detail of a check that holds, printed even when every check holds."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer of one check; a check with several problems has several findings."""

    check: str
    state: CheckState
    name: str = ""
    """Name of the error, in kebab case; empty unless `failed`."""
    what: str = ""
    """What happened, the detail of a check that holds, or why there is nothing to check."""
    why: str = ""
    next: str = ""

    @property
    def is_remark(self) -> bool:
        """Whether the check holds and its detail is printed anyway."""
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


def merged(failures: Iterable[Finding]) -> list[Finding]:
    """Join the failures of a check that have one reason and one remedy, to state both once."""
    joined: dict[tuple[str, ...], Finding] = {}
    for one in failures:
        key = (one.check, one.name, one.why, one.next)
        known = joined.get(key)
        joined[key] = replace(one, what=f"{known.what}\n{one.what}") if known else one
    return list(joined.values())
