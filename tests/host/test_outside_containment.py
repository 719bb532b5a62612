"""What is not contained continues: timers, Ctrl-C, other threads, libraries."""

from __future__ import annotations

import itertools
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cppmega.errors import CppmegaError
from cppmega.host import containment
from cppmega.host.containment import contained


def _error(what: str) -> CppmegaError:
    return CppmegaError("a", what, "b", "c")


@contextmanager
def _timer(seconds: float) -> Iterator[None]:
    """A timer of the caller, such as pytest's own time limit; it must be heard by the end."""
    heard: list[int] = []
    handler = signal.signal(signal.SIGALRM, lambda number, frame: heard.append(number))
    before = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
        deadline = time.monotonic() + 100
        while not heard and time.monotonic() < deadline:
            time.sleep(0.01)
        assert heard == [signal.SIGALRM]
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *before)


def test_a_timer_that_was_set_continues() -> None:
    with _timer(0.1), contained(_error):
        pass


@pytest.mark.parametrize("at", range(4))
def test_a_timer_that_ends_between_two_lines_is_not_the_page_s(
    monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The machine stops for a moment, before or after one of the handlers is set."""
    set_handler, lines = signal.signal, itertools.count()

    def stop() -> None:
        if next(lines) == at:
            time.sleep(0.1)

    def slowly(*arguments: Any) -> Any:
        stop()
        before = set_handler(*arguments)
        stop()
        return before

    monkeypatch.setattr(containment.signal, "signal", slowly)
    with _timer(0.05), contained(_error):
        pass


def test_ctrl_c_passes() -> None:
    with pytest.raises(KeyboardInterrupt), contained(_error):
        raise KeyboardInterrupt


def test_what_others_do_meanwhile_is_not_the_page(tmp_path: Path) -> None:
    """A profiler's thread may write its files while a rank loads its pages."""
    go, done = threading.Event(), threading.Event()

    def write() -> None:
        go.wait(100)
        (tmp_path / "profile").write_text("x")
        subprocess.run(["true"], check=True)
        done.set()

    other = threading.Thread(target=write)
    other.start()
    with contained(_error):
        go.set()
        assert done.wait(100)
    other.join()
    assert (tmp_path / "profile").read_text() == "x"
