"""What libcst does not see comes back as it was, and edits do what they do without the cuts."""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cppmega.edits import adding_argument, appending, in_order, inserting, replacing
from cppmega.errors import CppmegaError
from cppmega.page import Edit
from cppmega.rewriting import abridged, rewrite, source
from cppmega.rewriting.rewrite import Step
from tests.rewriting.test_properties import QUICK, Module, modules

pytestmark = pytest.mark.slow

EDITS = {
    "replacing": replacing("payload(1)", "payload(2, extra)"),
    "removing": replacing("payload(1)", ""),
    "before": inserting("z = 0", before="payload(1)"),
    "after": inserting("z = 0", after="x = 1"),
    "two statements": replacing("x = 1\ny = 2", "x = y = 0"),
    "a head": replacing("if x:", "if not x:"),
    "at the end": appending("z = 0"),
    "an argument": adding_argument("payload", "extra=extra"),
    "in order": in_order(inserting("z = 0", after="payload(1)"), replacing("z = 0", "z = 1")),
}


def outcome(module: Module, name: str, fewest: int) -> bytes | tuple[str, str]:
    """The bytes after an edit, or the error, if so few lines are worth a cut."""
    edit = Edit(f"m.py:{module.symbol}", {}, EDITS[name])
    with mock.patch.object(abridged, "_FEWEST", fewest):
        try:
            return rewrite.rewrite(module.data, "m.py", [Step("page", edit, marked=False)]).data
        except CppmegaError as error:
            return error.name, error.what


@given(modules(), st.sampled_from(sorted(EDITS)))
@QUICK
@example(
    Module(
        b"payload = x = extra = 1\rdef t():\r    payload(1)\r    pass\r", "t", "utf-8", 1, False
    ),
    "an argument",
)
def test_cuts_change_nothing(module: Module, name: str) -> None:
    assert outcome(module, name, 1) == outcome(module, name, 10**6)


TEXT = """\
@deco
def t(x):
    "Doc."
    first = 1
    # about the second
    second = [
        x,
    ]
    if x:
        payload(1)
    third = 3  # said
    return first
"""


def shortened(*patterns: str, text: str = TEXT) -> str:
    """What libcst sees of a text for edits that look for these patterns."""
    found = source.decode(text.encode(), "m.py")
    tree = source.parse(found, "m.py")
    (definition,) = source.find(tree, "t")
    edits = [Edit("m.py:t", {}, replacing(pattern, "y"), mark="") for pattern in patterns]
    with mock.patch.object(abridged, "_FEWEST", 1):
        where = source.span(tree, found, definition)
        short = abridged.abridge(found, definition, where, "t", edits)
    assert short.restored(short.text) == text
    return short.text


def test_only_statements_with_all_names_of_a_pattern_are_seen() -> None:
    seen = shortened("payload(1)")
    assert "if x:\n        payload(1)\n" in seen and '"Doc."' in seen
    assert not any(name in seen for name in ("first", "second", "third", "about", "return"))
    assert "third = 3" in shortened("payload(1)", "third")
    assert "second" not in shortened("first.second")
    # Each statement of a pattern by itself: they need not be in one statement of the text.
    assert {"second", "third"} <= set(shortened("second\nthird").split())


def test_a_pattern_without_names_sees_everything() -> None:
    for pattern in ("pass", "'text'", "é.x"):
        assert shortened(pattern) == TEXT


def test_what_shares_its_lines_is_seen() -> None:
    text = (
        "def t(x):\n    a = 0; b = 1\n    c = 2; \\\n    d = 3\n    payload(1)\n    e = 4; f = 5\n"
    )
    seen = shortened("payload(1)", text=text)
    assert "b = 1" in seen and "payload(1)" in seen


def test_a_text_that_holds_such_a_name_already_is_left_alone() -> None:
    text = TEXT.replace("third", "_cppmega_lines_0")
    assert shortened("payload(1)", text=text) == text
