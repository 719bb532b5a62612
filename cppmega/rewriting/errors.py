"""Errors of rewriting that other packages catch."""

from __future__ import annotations

from typing import Any

from cppmega.errors import CppmegaError


class EditMismatchError(CppmegaError):
    """An edit does not fit the text of its target.

    Args:
        problem: what does not fit, without a period.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(
            "edit-mismatch",
            f"An edit does not fit its target: {problem}.",
            "A patch that changes the wrong place, or none, trains the wrong model.",
            "correct the page; `cppmega diff NAME` shows the result",
        )
        self.problem = problem

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problem,)


class TargetError(CppmegaError):
    """A target is not exactly one definition on lines of its own."""


class OutsideTargetError(CppmegaError):
    """An edit changes code outside of its target."""


class UndefinedNameError(CppmegaError):
    """Patched code uses a name that nothing defines."""
