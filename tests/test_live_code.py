"""What the imports of patched files gave is what runs, until the end of the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import made
from tests.test_guard import Bench

TESTS = Path(__file__).parent
FILES = {
    "megatron/core/thing.py": """\
import functools

from megatron.core.decorators import announced

LIMIT = 3
STATE = {}
_COUNT = 0


def double(x):
    return x


def half(x):
    return x / 2


def helper(x):
    return len([x])


def bump():
    global _COUNT
    _COUNT += 1


def counter(function):
    calls = 0

    def counted(x):
        nonlocal calls
        calls += 1
        return function(x)

    return counted


@counter
def counted(x):
    return x


@announced
def decorated(x, by=1):
    return x * by


@functools.lru_cache
def cached(x):
    return x


@functools.singledispatch
def shown(x):
    return str(x)


class Layer:
    SCALE = 2
    calls = 0

    def forward(self, x, *, by=2):
        Layer.calls += 1
        return double(x) * by

    @staticmethod
    def fixed(x):
        return x

    @property
    def width(self):
        return 1


class Wide(Layer):
    pass
""",
    "megatron/core/decorators.py": """\
import functools


def announced(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)

    return inner
""",
    "megatron/core/blocks/__init__.py": "from ..thing import Layer\n",
    "megatron/core/user.py": """\
from megatron.core.blocks import Layer
from megatron.core.thing import double


def run(x):
    return double(x) + Layer().forward(x)
""",
    "megatron/core/late.py": "def third(x):\n    return x\n",
}
WRONG = {
    "wraps_of_stock": "thing.py:double is __main__:fresh.<locals>.<lambda>",
    "honest_wrapper": "--allow-wrapper __main__:timed.<locals>.wrapper",
    "its_own_name": "thing.py:double is __main__:named_like.<locals>.double",
    "partial": "thing.py:double is a functools.partial of __main__:stock",
    "callable_object": "thing.py:double is an object of type __main__:Called",
    "builtin": "thing.py:double is",
    "method": "thing.py:Layer.forward is __main__:<lambda>",
    "static_method": "thing.py:Layer.fixed is __main__:stock",
    "property_of_a_class": "thing.py:Layer.width is",
    "class_constant": "thing.py:Layer.SCALE is 3",
    "module_constant": "thing.py:LIMIT is 4",
    "helper_in_the_file": "thing.py:helper is __main__:stock",
    "imported_helper": "thing.py:announced is __main__:stock",
    "imported_module": "thing.py:functools is",
    "whole_class": "thing.py:Layer is class",
    "below_its_decorator": "thing.py:decorated is",
    "copy_in_an_importer": "copy double in module megatron.core.user is __main__:stock",
    "copy_through_a_package": "copy Layer in module megatron.core.user is class __main__:Called",
    "deleted": "thing.py:helper is gone",
    "method_added_to_a_class": "thing.py:Layer.__getattribute__ is",
    "builtin_shadowed_in_the_module": "thing.py:len is __main__:stock",
    "builtins_of_the_module": "thing.py:__builtins__ is",
    "wrapper_kept_by_another_module": "copy faster in module helpers_of_mine is __main__:fresh",
    "code_object": "thing.py:double was changed in place: its code is stock (",
    "code_of_a_constant": "thing.py:double was changed in place: its code is double (",
    "defaults": "thing.py:decorated was changed in place: its defaults is (7,)",
    "keyword_defaults": "thing.py:Layer.forward was changed in place: its default of by is 9",
    "code_below_a_decorator": "thing.py:decorated was changed in place: its code is stock",
    "bases": "thing.py:Wide was changed in place: its bases is",
    "closure": "thing.py:decorated was changed in place: its closure function is __main__:stock",
    "implementation_of_a_generic_function": "thing.py:shown was changed in place",
    "module_made_in_memory": "Module megatron.core.thing (without a file",
    "copy_of_the_module": "Module twin (",
    "loaded_by_path": "Module second_thing (",
    "file_changed_on_disk": "is not what was applied; it carries double_doubles",
}
"""Scene of `live_attacks` -> what the guard must say."""
FINE = (
    *("fine_imported_again", "fine_reloaded", "fine_under_another_name", "fine_state"),
    *("fine_vouched", "fine_subclass", "before"),
)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    bench = Bench(tmp_path_factory.mktemp("live"))
    made.page(bench.pages)
    at_run_time(bench.pages)
    bench.tree(files=FILES)
    return bench


def at_run_time(pages: Path) -> None:
    """A page that divides by ten, installed when the module is imported."""
    source = "def half(x):\n    return x / 2\n"
    path = made.page(pages, "half_at_run_time", target="megatron/core/thing.py:half", source=source)
    text = path.read_text().replace('reached="forward"', 'reached="never"')
    text = text.replace('replacing("return x", "return 2 * x")', 'tenth, kind="function-swap"')
    text = text.replace("PATCH =", "def tenth(original):\n    return lambda x: x / 10\n\nPATCH =")
    path.write_text(text)


@pytest.fixture(scope="module")
def found(bench: Bench) -> dict[str, tuple[str, str]]:
    ((code, out, err),) = bench.run(bench.folder / "root", script=TESTS / "live_attacks.py")
    assert code == 0, err
    return json.loads(out.partition("FOUND ")[2])


@pytest.mark.parametrize("scene", WRONG)
def test_other_code_than_was_proved(found: dict[str, tuple[str, str]], scene: str) -> None:
    during, afterwards = found[scene]
    assert WRONG[scene] in during
    assert afterwards == "", "the check refuses what was put back"


@pytest.mark.parametrize("scene", FINE)
def test_no_false_alarm(found: dict[str, tuple[str, str]], scene: str) -> None:
    assert found[scene] == ["", ""]


def test_no_scene_is_left_out(found: dict[str, tuple[str, str]]) -> None:
    assert found.keys() == {*WRONG, *FINE, "met"}
    assert json.loads(found["met"][0]) == {"double": "__main__:timed.<locals>.wrapper"}
