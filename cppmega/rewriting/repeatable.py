"""Edits that need not be run twice to show that they are deterministic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_PATTERNS = "_cppmega_patterns"


def repeatable(edit: Callable[[Any], Any], *patterns: str) -> Callable[[Any], Any]:
    """Declare that an edit returns equal nodes for equal nodes, and does not change its input.

    This is known for the edits of `cppmega.edits`. Other functions are called twice, and the node
    is printed again, to verify it.

    Args:
        edit: the edit.
        patterns: the only code that it searches for in the statements of its target.
    """
    setattr(edit, _PATTERNS, patterns)
    return edit


def is_repeatable(edit: Callable[[Any], Any]) -> bool:
    """Whether an edit was declared repeatable."""
    return hasattr(edit, _PATTERNS)


def patterns_of(edit: Callable[[Any], Any]) -> tuple[str, ...]:
    """The patterns with which an edit was declared repeatable."""
    patterns: tuple[str, ...] = getattr(edit, _PATTERNS)
    return patterns
