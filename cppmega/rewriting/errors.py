"""Errors of rewriting that other packages catch."""

from __future__ import annotations

from typing import Any

from cppmega.errors import CppmegaError


class EditMismatchError(CppmegaError):
    """An edit does not fit the text of its target.

    Args:
        problem: what does not fit, without a period.
        page: the page of the edit, where it is known.
    """

    def __init__(self, problem: str, page: str = "") -> None:
        edit = f"An edit of page {page}" if page else "An edit"
        super().__init__(
            "edit-mismatch",
            f"{edit} does not fit its target: {problem}.",
            "A patch that changes the wrong place, or none, trains the wrong model.",
            f"correct the page; `cppmega diff {page or 'NAME'}` shows the result",
        )
        self.problem, self.page = problem, page

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problem, self.page)


class BadEditError(CppmegaError):
    """An edit does not do what its page declares."""


class TargetError(CppmegaError):
    """A target is not exactly one definition on lines of its own."""


class OutsideTargetError(CppmegaError):
    """An edit changes code outside of its target."""


class UndefinedNameError(CppmegaError):
    """Patched code uses a name that nothing defines."""
