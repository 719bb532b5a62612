"""Words of messages and tables that depend on a number."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """The number and its noun, such as `1 GPU` or `2 GPUs`.

    Args:
        number: how many.
        noun: for one of them.
        plural: for any other number; "": the noun with an s.
    """
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
