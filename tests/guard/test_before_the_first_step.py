"""Code that was other than the proved one when the first step began, and tools that change none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.guard.bench import Bench
from tests.guard.made_files import FILES
from tests.support import made

pytestmark = pytest.mark.slow

WRONG = {
    "ours_replaced": "env.py:is_on is __main__:stand_in",
    "ours_code_swapped": "env.py:is_on was changed in place: its code is stand_in",
    "ours_stub_in_sys_modules": "cppmega.host.env was created in memory",
    "ours_stub_with_the_name_of_its_file": "cppmega.host.env, as an attribute of cppmega.host",
    "replaced": "thing.py:double is __main__:stock",
    "wrapped": "thing.py:double is __main__:wrapped.<locals>.<lambda>",
    "code_of_another_function_of_the_file": "double was changed in place: its code is helper",
    "method_replaced": "thing.py:Layer.forward is __main__:method_replaced",
    "code_of_a_method": "thing.py:Layer.forward was changed in place",
    "keyword_defaults": "Layer.forward was changed in place: its default of by is 9",
    "below_its_decorator": "thing.py:decorated is",
    "decorator_of_the_script": "thing.py:decorated is __main__:decorator_of_the_script",
    "alias_of_an_import": "copy d in module megatron.core.aliases is __main__:stock",
    "alias_of_an_attribute": "copy e in module megatron.core.aliases is __main__:stock",
    "code_in_a_file_without_a_patch": "decorators.py:announced was changed in place",
}
"""Scene of `before_the_first_step` -> what the guard says."""
FINE = (
    *("fine_lazy_loader", "fine_chained_loader", "fine_loaded_by_its_path"),
    *("fine_copies_by_value", "fine_profiled_by_line", "fine_used"),
    "fine_decorator_of_a_package_elsewhere",
)
ALIASES = "from megatron.core import thing\nfrom megatron.core.thing import double as d\n\ne = d\n"
CALLS_OURS = '''"""
    from cppmega.host.env import is_on

    return 2 * x if is_on("1") else x
    """'''


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    bench = Bench(tmp_path_factory.mktemp("before"))
    made.page(bench.pages, edit=f'replacing("return x", {CALLS_OURS})')
    root = bench.tree(files=FILES | {"megatron/core/aliases.py": ALIASES})
    script = Path(__file__).with_name("before_the_first_step.py")
    ((code, out, err),) = bench.run(root, script=script)
    assert code == 1 and "error: stale-code" in err, "a fork that was refused ends its parent"
    found: dict[str, str] = json.loads(out.partition("FOUND ")[2])
    assert found.keys() == {*WRONG, *FINE}
    return found


@pytest.mark.parametrize("scene", WRONG)
def test_other_code_stops_the_first_step(found: dict[str, str], scene: str) -> None:
    assert WRONG[scene] in found[scene], found[scene]


@pytest.mark.parametrize("scene", FINE)
def test_a_tool_that_changes_no_code_stops_nothing(found: dict[str, str], scene: str) -> None:
    assert found[scene] == ""
