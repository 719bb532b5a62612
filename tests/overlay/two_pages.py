"""Two pages on a small tree, each for a file of its own."""

from __future__ import annotations

from tests.support.lab import A, B, Lab


def two_pages(lab: Lab) -> None:
    lab.page("one")
    lab.page("two", f"{B}:single", 'replacing("x", "x + 1", times=1)')


def consistent(lab: Lab) -> None:
    """After a kill every file is whole: it is one of the texts that it may be."""
    for path in (A, B):
        compile((lab.root / path).read_bytes(), path, "exec")
