"""`name#2`: a page names one of several definitions, one for each branch of an `if`."""

from __future__ import annotations

from pathlib import Path

import pytest

from cppmega.errors import CppmegaError
from cppmega.guard import modules
from tests.support.lab import TARGET, A, Lab

_EITHER = b"""\
HAVE = True

if HAVE:

    def double(x):
        return x + x

else:

    def double(x):
        return x + x + 0
"""


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    lab = Lab(tmp_path, monkeypatch)
    lab.files[A] = _EITHER
    return lab


@pytest.mark.parametrize(("nth", "edit"), [(1, '"x + x", "3 * x"'), (2, '"x + x + 0", "3 * x"')])
def test_only_the_definition_that_is_counted_changes(lab: Lab, nth: int, edit: str) -> None:
    lab.page(target=f"{TARGET}#{nth}", edit=f"replacing({edit})")
    lab.wheel()
    assert lab.apply().ok
    lab.applied("page")
    assert lab.value("double(4)") == (12 if nth == 1 else 8)
    assert lab.text().count("3 * x") == 1
    assert lab.revert().ok
    lab.pristine()


@pytest.mark.parametrize(("target", "state"), [("#1", "drifted"), ("#3", "absent")])
def test_counted_definition_is_known_by_its_text(lab: Lab, target: str, state: str) -> None:
    """Another text in that place, and a place that is not there."""
    lab.page(target=TARGET + target, pins={"1.0": "0123456789abcdef"})
    lab.wheel()
    assert lab.refused().state == state


def test_undefined_name_in_a_counted_definition(lab: Lab) -> None:
    lab.page(target=f"{TARGET}#1", edit='replacing("x + x", "missing * x")')
    lab.wheel()
    with pytest.raises(CppmegaError, match="missing") as caught:
        lab.apply()
    assert caught.value.name == "undefined-name"


def test_live_code_may_be_that_of_either_branch(lab: Lab) -> None:
    lab.page(target=f"{TARGET}#2", edit='replacing("x + x + 0", "3 * x")')
    lab.wheel()
    assert lab.apply().ok
    module = lab.watched("megatron.core.a")
    modules.check()
    vars(module)["double"] = lambda x: 0
    with pytest.raises(CppmegaError, match="double") as caught:
        modules.check()
    assert caught.value.name == "stale-code"
