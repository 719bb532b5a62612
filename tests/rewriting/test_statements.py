"""Targets that are statements of a module or a class: constants, imports, `try` blocks, fields."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from cppmega.edits import adding_argument, appending, in_order, inserting, replacing
from cppmega.errors import CppmegaError
from cppmega.guard import modules
from cppmega.overlay import verbs as overlay
from cppmega.rewriting import rewrite
from cppmega.rewriting.source import find
from tests.rewriting.one_edit import edited, fails, step
from tests.support.lab import A, Lab

TEXT = '''\
"""A module."""

import os
from os import path, sep  # two of them

LIMIT: int = 1  # as upstream has it

try:
    import json as _json

    HAVE_JSON = _json is not None
except ImportError:
    HAVE_JSON = False

TWICE = 1
TWICE = 2
FIRST = 1; SECOND = 2


class Sizes:
    width: int = 1
    """The width."""
    depth: int = [2 for total in "a"][0]

    def area(self):
        total = self.width * self.depth
        return total


def tail(x):
    return os.path.join(str(x), str(LIMIT), path.join(sep))
'''


@pytest.mark.parametrize(
    ("symbol", "edit", "expression", "value"),
    [
        ("LIMIT", replacing("1", "2"), "LIMIT", 2),
        ("LIMIT", in_order(replacing("1", "2"), replacing("2", "1 + 2")), "LIMIT", 3),
        ("LIMIT", inserting("MORE = 5", after="LIMIT: int = 1"), "MORE + LIMIT", 6),
        ("LIMIT", inserting("MORE = 5", before="LIMIT: int = 1"), "MORE + LIMIT", 6),
        ("TWICE#2", replacing("2", "3"), "TWICE", 3),
        ("import.path", replacing("from os import path, sep", "import os.path as path"), "1", 1),
        ("import.os", inserting("import math", after="import os"), "math.pi > 3", True),
        ("HAVE_JSON", replacing("_json is not None", "'yes'"), "HAVE_JSON", "yes"),
        ("HAVE_JSON", replacing("import json as _json", "import no_such as _json"), "HAVE_JSON", 0),
        ("import._json", inserting("HAVE_XML = 1", before="try:"), "HAVE_XML", 1),
        ("Sizes.width", replacing("1", "7"), "Sizes.width", 7),
        ("Sizes.depth", inserting("height = 4", before='depth: int = [2 for total in "a"][0]'),
         "Sizes.height, Sizes.depth", (4, 2)),
        ("Sizes.depth", replacing('[2 for total in "a"][0]', "9"), "Sizes().area()", 9),
    ],
)  # fmt: skip
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_statement_changes_and_nothing_else(
    symbol: str, edit: Any, expression: str, value: object, newline: str
) -> None:
    text = TEXT.replace("FIRST = 1; SECOND = 2\n", "").replace("\n", newline)
    new = edited(text, edit, symbol)
    scope: dict[str, Any] = {"__name__": "made"}
    exec(compile(new, "made", "exec"), scope)
    assert eval(expression, scope) == value
    (node,) = find(ast.parse(text), symbol)
    kept = text.splitlines(keepends=True)
    head, end = kept[: node.lineno - 1], kept[node.end_lineno :]
    assert new.startswith("".join(head)) and new.endswith("".join(end))


@pytest.mark.parametrize(
    ("symbol", "edit", "name", "reason"),
    [
        ("LIMITS", replacing("1", "2"), "target-absent", "0 times"),
        ("Sizes.total", replacing("1", "2"), "target-absent", "0 times"),
        ("Sizes.area.total", replacing("1", "2"), "target-absent", "0 times"),
        ("TWICE", replacing("1", "2"), "target-ambiguous", "2 times"),
        ("FIRST", replacing("1", "2"), "target-shares-its-lines", "a line"),
        ("SECOND", replacing("2", "1"), "target-shares-its-lines", "a line"),
        ("LIMIT", replacing("2", "1"), "edit-mismatch", "`2` occurs 0 times"),
        ("LIMIT", appending("OTHER = 1"), "edit-mismatch", "a statement, not a function"),
        ("LIMIT", replacing("LIMIT: int = 1", ""), "bad-edit", "0 statements"),
        ("LIMIT", replacing("LIMIT: int = 1", "OTHER = 1"), "bad-edit", "0 statements"),
        ("LIMIT", inserting("LIMIT = 2", after="LIMIT: int = 1"), "bad-edit", "2 statements"),
        ("LIMIT", replacing("1", "1"), "bad-edit", "changes nothing"),
        ("LIMIT", replacing("1", "missing"), "undefined-name", "missing"),
        ("LIMIT", replacing("LIMIT: int = 1", "LIMIT = TWICE = 1"),
         "edit-reaches-beyond-its-target", "TWICE = ..."),
        ("LIMIT", inserting("def tail(x): pass", after="LIMIT: int = 1"),
         "edit-reaches-beyond-its-target", "tail = ..."),
        ("LIMIT", inserting("os.sep = '+'", after="LIMIT: int = 1"),
         "edit-reaches-beyond-its-target", "os.sep = ..."),
        ("LIMIT", inserting("print = len", after="LIMIT: int = 1"),
         "edit-reaches-beyond-its-target", "print = ..."),
        ("LIMIT", replacing("1", "exec('')"), "edit-reaches-beyond-its-target", "exec()"),
        ("Sizes.width", inserting("area = 3", after="width: int = 1"),
         "edit-reaches-beyond-its-target", "area = ..."),
    ],
)  # fmt: skip
def test_edit_of_a_statement_is_refused(symbol: str, edit: Any, name: str, reason: str) -> None:
    if name.startswith("target"):
        with pytest.raises(CppmegaError, match=reason) as caught:
            edited(TEXT, edit, symbol)
        assert caught.value.name == name
    else:
        assert reason in fails(name, TEXT, edit, symbol=symbol).what


def test_two_names_of_one_block_are_refused() -> None:
    steps = [
        step(replacing("_json is not None", "True"), "HAVE_JSON"),
        step(adding_argument("f", "x", 0), "import._json"),
    ]
    with pytest.raises(CppmegaError, match=r"HAVE_JSON and .*import\._json") as caught:
        rewrite.rewrite(TEXT.encode(), A, steps)
    assert caught.value.name == "targets-overlap"


def test_a_mark_has_no_place_in_a_statement(lab: Lab) -> None:
    lab.page(target=f"{A}:LIMIT", edit='replacing("1", "2")')
    lab.wheel()
    with pytest.raises(CppmegaError, match="is a statement") as caught:
        lab.apply()
    assert caught.value.name == "mark-has-no-place"


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    lab = Lab(tmp_path, monkeypatch)
    lab.files[A] = TEXT.encode()
    return lab


PAGES = {
    "constant": ("LIMIT", 'replacing("1", "2")', "LIMIT"),
    "block": ("HAVE_JSON", 'inserting("HAVE_XML = 1", before="try:")', "HAVE_XML"),
    "line": ("import.os", 'inserting("import math", after="import os")', "math.floor(2.5)"),
    "field": ("Sizes.width", 'replacing("1", "2")', "Sizes.width"),
}


def test_states_of_statements(lab: Lab) -> None:
    for name, (symbol, edit, _) in PAGES.items():
        lab.page(name, f"{A}:{symbol}", edit, reached="never")
    lab.wheel()
    assert {v.state for v in lab.status().verdicts} == {"pending"}
    assert lab.apply().ok
    lab.applied(*PAGES)
    assert [lab.value(expression) for _, _, expression in PAGES.values()] == [2, 1, 2, 2]
    assert not lab.apply().changed
    assert "+LIMIT: int = 2" in overlay.diff(lab.session(), "constant", {})
    assert lab.revert("constant").ok and lab.value("LIMIT") == 1
    assert lab.revert().ok
    lab.pristine()


@pytest.mark.parametrize(
    ("old", "new", "state"),
    [
        (b"LIMIT: int = 1 ", b"LIMIT: int = 5 ", "drifted"),
        (b"LIMIT: int = 1 ", b"_LIMIT: int = 1 ", "undefined"),
        (b"LIMIT: int = 1 ", b"LIMIT: int = 1\nLIMIT = 2 ", "ambiguous"),
        (b"as upstream", b"as nobody", "foreign"),
        (b"total = self", b"total = 0 + self", "foreign"),
    ],
)
def test_states_of_a_changed_statement(lab: Lab, old: bytes, new: bytes, state: str) -> None:
    lab.page(target=f"{A}:LIMIT", edit='replacing("1", "2")', reached="never")
    lab.wheel()
    lab.change(A, old, new)
    assert lab.verdict().state == state.replace("undefined", "absent")


def test_other_statements_do_not_matter_to_the_pin(lab: Lab) -> None:
    """A class that changes in seventy places in a release still has the field."""
    lab.page(target=f"{A}:Sizes.width", edit='replacing("1", "2")', reached="never")
    lab.files[A] = lab.files[A].replace(b"depth: int", b"# new\n    depth: float")
    lab.wheel()
    assert lab.apply().ok
    assert lab.value("Sizes.width") == 2


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_missing_feature_makes_it_not_applicable(lab: Lab, when: str) -> None:
    lab.page(target=f"{A}:Sizes.width", edit='replacing("1", "2")', reached="never",
             feature=(f"{A}:LIMIT",))  # fmt: skip
    lab.files[A] = lab.files[A].replace(b"width: int = 1", b"width: int = 0")
    if when == "after":
        lab.files[A] = lab.files[A].replace(b"LIMIT: int", b"OTHER: int").replace(b"LIMIT", b"1")
    lab.wheel()
    assert lab.verdict().state == ("drifted" if when == "before" else "not-applicable")


def test_the_guard_expects_the_patched_value(lab: Lab) -> None:
    lab.page(target=f"{A}:LIMIT", edit='replacing("1", "2")', reached="never")
    lab.wheel()
    assert lab.apply().ok
    module = lab.watched("megatron.core.a")
    modules.check()
    vars(module)["LIMIT"] = 1
    with pytest.raises(CppmegaError, match="LIMIT") as caught:
        modules.check()
    assert caught.value.name == "stale-code"
