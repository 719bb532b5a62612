"""A number and its noun agree."""

from __future__ import annotations

from cppmega.host.wording import counted


def test_the_noun_agrees_with_the_number() -> None:
    assert [counted(number, "GPU") for number in (0, 1, 8)] == ["0 GPUs", "1 GPU", "8 GPUs"]
    assert [counted(n, "process", "processes") for n in (1, 2)] == ["1 process", "2 processes"]
