"""Objects of the first steps are left out of later collections; garbage made later is found."""

from __future__ import annotations

import gc
import weakref

from cppmega.training.garbage import STEPS, Garbage


class _Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_what_exists_after_the_first_steps_is_permanent_and_nothing_else() -> None:
    garbage, before = Garbage(), gc.get_freeze_count()
    left, kept = weakref.ref(_Cycle()), _Cycle()
    try:
        for _ in range(STEPS - 1):
            garbage.after_step()
        assert gc.get_freeze_count() == before
        garbage.after_step()
        assert left() is None, "garbage of the first steps must not become permanent"
        frozen = gc.get_freeze_count()
        assert frozen > before
        assert not any(each is kept for each in gc.get_objects())
        for _ in range(3):
            garbage.after_step()
        assert gc.get_freeze_count() == frozen
        later = weakref.ref(_Cycle())
        gc.collect()
        assert later() is None
    finally:
        gc.unfreeze()
