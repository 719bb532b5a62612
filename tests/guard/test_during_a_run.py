"""Code that is not what the imports of patched files gave, in every way that it can be changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.guard.bench import Bench
from tests.guard.made_files import FILES
from tests.support import made

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
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
    "module_made_in_memory": "megatron.core.thing was created in memory",
    "attribute_of_the_package": "as an attribute of megatron.core, was created in memory",
    "class_of_the_module": "thing.py:__class__ is class __main__:Answers",
    "copy_of_the_module": "Module twin was created from",
    "loaded_by_path": "Module second_thing was created from",
    "file_changed_on_disk": "since this process imported it. It carries double_doubles.",
}
"""Scene of `during_a_run` -> what the guard must say."""
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
    ((code, out, err),) = bench.run(bench.folder / "root", script=HERE / "during_a_run.py")
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
