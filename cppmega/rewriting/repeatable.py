"""Edits that need not be run twice to show that they are deterministic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_FLAG = "_cppmega_repeatable"


def repeatable(edit: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Declare that an edit returns equal nodes for equal nodes, and changes none that it is given.

    That is known of the edits of `cppmega.edits`. Other functions are called twice, and the node is
    printed again, to show the same.
    """
    setattr(edit, _FLAG, True)
    return edit


def is_repeatable(edit: Callable[[Any], Any]) -> bool:
    """Whether an edit was declared repeatable."""
    return getattr(edit, _FLAG, False) is True
