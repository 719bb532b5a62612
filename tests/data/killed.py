"""Preparations that are killed, as a machine might kill them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


def killed_at_each_rename(
    monkeypatch: pytest.MonkeyPatch, run: Callable[[int], object], check: Callable[[int], None]
) -> int:
    """Kill `run(0)` at its first rename, `run(1)` at its second, until one is not killed.

    Args:
        monkeypatch: of the test.
        run: takes the number of renames that it is allowed.
        check: is called with the same number after each kill.

    Returns:
        How many were killed.
    """
    rename = Path.replace
    for point in range(100):
        calls = 0

        def replace(self: Path, target: Path, point: int = point) -> Path:
            nonlocal calls
            calls += 1
            if calls > point:
                raise KeyboardInterrupt
            return rename(self, target)

        monkeypatch.setattr(Path, "replace", replace)
        try:
            run(point)
        except KeyboardInterrupt:
            pass
        else:
            return point
        finally:
            monkeypatch.setattr(Path, "replace", rename)
        check(point)
    raise AssertionError("a hundred renames")
