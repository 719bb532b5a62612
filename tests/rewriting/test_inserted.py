"""What an edit adds outside of its target: it binds new names, and runs nothing of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cppmega.edits import body_of, inserting, replacing
from cppmega.errors import CppmegaError
from cppmega.page import Edit
from cppmega.rewriting import rewrite
from cppmega.rewriting.rewrite import Step
from tests.support.lab import A, Lab
from tests.support.made import snapshot

_FILE = """\
import os
from typing import Any
try:
    import fast
except ImportError:
    fast = None
if Any:
    import json

LIMIT = 1


def f(x):
    return x


class C:
    size = 1

    def g(self, x):
        return x
"""


def edited(edit: Callable[[Any], Any] | None = None, symbol: str = "f", **more: Any) -> str:
    edit = edit or replacing("return x", "return -x")
    step = Step("page", Edit(f"{A}:{symbol}", {}, edit, **more), marked=False)
    return rewrite.rewrite(_FILE.encode(), A, [step]).data.decode()


def refused(name: str, said: str, **more: Any) -> None:
    with pytest.raises(CppmegaError) as caught:
        edited(**more)
    assert caught.value.name == name
    assert said in caught.value.what and "page" in caught.value.what


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("from math import *", "does not spell out"),
        ("import math; print(1)", "not exactly one import"),
        ("import math\nLIMIT = 2", "not exactly one import"),
        ("print(1)", "not exactly one import"),
        ("import math as", "not valid Python"),
        ("", "not exactly one import"),
        ("import math  # -*- coding: latin-1 -*-", "carries a comment"),
        ("from __future__ import annotations", "the whole file"),
        ("import math as os", "rebinds os"),
        ("from math import pi as LIMIT", "rebinds LIMIT"),
        ("from math import floor as f", "rebinds f"),
        ("import math as C", "rebinds C"),
        ("import math as fast", "rebinds fast"),
        ("import fast", "rebinds fast"),
        ("from math import pow", "special or builtin name"),
        ("import math as print", "special or builtin name"),
        ("import math as __getattr__", "special or builtin name"),
        ("import math as helper", "rebinds helper"),
    ],
)
def test_imports_that_do_more_than_bind_a_new_name(line: str, said: str) -> None:
    refused("bad-import", said, imports=(line,), helpers=(helper,))


@pytest.mark.parametrize(
    "line",
    ["import os", "import os.path", "from typing import Any", "import json", "import math as m"],
)
def test_imports_of_new_names_or_of_the_same_thing(line: str) -> None:
    scope: dict[str, Any] = {}
    exec(edited(imports=(line,)), scope)
    assert scope["f"](1) == -1 and scope["LIMIT"] == 1


def test_two_pages_that_bind_one_name_to_two_things() -> None:
    steps = [
        Step("one", Edit(f"{A}:f", {}, replacing("return x", "return -x"), imports=(one,)), False)
        for one in ("import math as m", "import cmath as m")
    ]
    with pytest.raises(CppmegaError) as caught:
        rewrite.rewrite(_FILE.encode(), A, [steps[0], second(steps[1])])
    assert caught.value.name == "bad-import"


def second(step: Step) -> Step:
    edit = Edit(f"{A}:C.g", {}, step.edit.edit, imports=step.edit.imports)
    return Step("two", edit, False)


def helper(x):  # type: ignore[no-untyped-def]
    return x


def rebinds(x):  # type: ignore[no-untyped-def]
    def inner():  # type: ignore[no-untyped-def]
        global LIMIT
        LIMIT = x

    return inner


def in_default(x=(LIMIT := 2)):  # type: ignore[no-untyped-def]
    return x


def runs(x=exec("pass")):  # type: ignore[no-untyped-def]  # noqa: B008
    return x


def __getattr__(name):  # type: ignore[no-untyped-def]
    raise AttributeError(name)


def decorated(function):  # type: ignore[no-untyped-def]
    return function


@decorated(eval("lambda f: f"))
def in_decorator(x):  # type: ignore[no-untyped-def]
    return x


class InBody:
    table = globals()


class WithMethod:
    def method(self, x=setattr(helper, "x", 1)):  # type: ignore[no-untyped-def]  # noqa: B008
        return x


renamed = eval("lambda x: x")
text_of_two = lambda x: x  # noqa: E731


@pytest.mark.parametrize(
    ("added", "said"),
    [
        (rebinds, "global LIMIT"),
        (in_default, "LIMIT := in its header"),
        (runs, "exec() when the file is imported"),
        (__getattr__, "special or builtin name"),
        (in_decorator, "eval() when the file is imported"),
        (InBody, "globals() when the file is imported"),
        (WithMethod, "setattr() when the file is imported"),
        (renamed, "no source of its own"),
        (text_of_two, "not written as one definition"),
    ],
)
def test_helpers_that_are_more_than_a_definition(added: Any, said: str) -> None:
    refused("bad-helper", said, helpers=(added,))


def ours(x):  # type: ignore[no-untyped-def]
    global LIMIT
    LIMIT = x
    return x


@pytest.mark.parametrize(
    ("edit", "symbol", "said"),
    [
        (body_of(ours), "f", "global LIMIT"),
        (inserting("def g():\n    global f\n    f = x", before="return x"), "f", "global f"),
        (lambda node: _head(node, "x=(LIMIT := 2)"), "f", "LIMIT := in its header"),
        (lambda node: _head(node, "self, x=(size := 2)"), "C.g", "size := in its header"),
        (lambda node: _head(node, "x=eval('1')"), "f", "eval() when the file is imported"),
    ],
)
def test_targets_that_reach_beyond_themselves(edit: Any, symbol: str, said: str) -> None:
    refused("edit-reaches-beyond-its-target", said, edit=edit, symbol=symbol)


def _head(node: Any, parameters: str) -> Any:
    import libcst as cst

    new: Any = cst.parse_statement(f"def _({parameters}): pass")
    return node.with_changes(params=new.params)


# -- edits that are not functions of their node --------------------------------------------------

_EDITS = {
    "counter": """
    calls = []
    def act(node):
        calls.append(1)
        return replacing("x + x", f"{len(calls)} * x")(node)
    """,
    "time": """
    import time
    def act(node):
        return replacing("x + x", f"{time.perf_counter_ns()} * x")(node)
    """,
    "random": """
    import random
    def act(node):
        return replacing("x + x", f"{random.random()} * x")(node)
    """,
    "comment": """
    import itertools
    numbers = itertools.count()
    def act(node):
        import libcst as cst
        lines = [cst.EmptyLine(comment=cst.Comment(f"# {next(numbers)}"))]
        node = replacing("x + x", "2 * x")(node)
        first = node.body.body[0].with_changes(leading_lines=lines)
        return node.with_changes(body=node.body.with_changes(body=[first, *node.body.body[1:]]))
    """,
    "second": """
    calls = []
    def act(node):
        calls.append(1)
        return replacing("x + x", "2 * x")(node) if len(calls) == 1 else None
    """,
}


@pytest.mark.parametrize("how", _EDITS)
def test_an_edit_that_differs_between_two_calls(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(tmp_path, monkeypatch)
    lab.wheel()
    lab.page(edit="act", code=_EDITS[how])
    before = snapshot(lab.root)
    with pytest.raises(CppmegaError) as caught:
        lab.apply()
    assert caught.value.name == "bad-edit" and "called again" in caught.value.what
    assert snapshot(lab.root) == before
