"""Words of messages and tables that depend on a number."""

from __future__ import annotations

from collections.abc import Sequence


def counted(number: int, noun: str, plural: str = "") -> str:
    """The number and its noun, such as `1 GPU` or `2 GPUs`.

    Args:
        number: how many.
        noun: for one of them.
        plural: for any other number; "": the noun with an s.
    """
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def listed(names: Sequence[str], most: int = 4) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
