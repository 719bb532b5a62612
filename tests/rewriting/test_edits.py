"""Edits: exactly the target, or a named error; what belongs to a target and what does not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import libcst as cst
import pytest

from cppmega.edits import (
    adding_argument,
    adding_parameter,
    appending,
    body_of,
    definition_of,
    in_order,
    inserting,
    replacing,
)
from cppmega.errors import CppmegaError
from cppmega.page import Edit
from cppmega.rewriting import function_source, rewrite
from cppmega.rewriting.rewrite import Step
from tests.rewriting.one_edit import PLAIN, edited, fails, step
from tests.support.lab import FILES, REPOSITORY, A, Lab
from tests.support.made import pin

# -- replacing --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "before", "after"),
    [
        ("a.b", "c", "return a.b + a.c", "return c + a.c"),
        ("f(x, y)", "g(x)", "return f(x,\n        y)", "return g(x)"),
        ("a + b", "g(a)", "return (a + b) * 2", "return (g(a)) * 2"),
        ("a + b", "a or b", "return (a + b) * 2", "return (a or b) * 2"),
        ("a", "b + c", "return g(a)", "return g(b + c)"),
        ("a", "(b + c)", "return a * 2", "return (b + c) * 2"),
        ("x = 1", "x = 2", "x  =  1  # why\n    return x", "x = 2\n    return x"),
        ("x = 1\ny = 2", "z = 3", "x = 1\n    y = 2\n    return z", "z = 3\n    return z"),
        ("x = 1", "", "x = 1\n    return 2", "return 2"),
        ("if a:", "if b:", "if a:\n        return 1", "if b:\n        return 1"),
        ("x=1", "y=2", "return g(a, x=1)", "return g(a, y=2)"),
        ("x = 1", "x = 2", "x = 1\n    return g(x=1)", "x = 2\n    return g(x=1)"),
        ("with a and b:", "with a, b:", "with a and b:\n        pass", "with a, b:\n        pass"),
    ],
)
def test_replacing(old: str, new: str, before: str, after: str) -> None:
    """By syntax, in whatever layout."""
    head = "a = b = c = g = x = y = z = 1\ndef f():\n    {}\n"
    assert edited(head.format(before), replacing(old, new)) == head.format(after)


def test_names_that_are_no_expressions() -> None:
    text = "def f(x, y):\n    return x.x + f(x=x, y=1)\n"
    assert edited(text, replacing("x", "y", times=2)) == text.replace("x.x", "y.x").replace(
        "x=x", "x=y"
    )


@pytest.mark.parametrize(
    ("old", "new", "body"),
    [
        ("a", "b + c", "return a * 2"),
        ("a", "b or c", "return not a"),
        ("a", "b if c else b", "return a + 1"),
        ("a", "lambda: b", "return a()"),
        ("a", "-b", "return a ** 2"),
        ("a", "b, c", "return g(a)"),
        ("a", "b < c", "return a < c"),
    ],
)
def test_expression_that_would_come_apart(old: str, new: str, body: str) -> None:
    """`x` -> `b + c` in `x * 2` must not become `b + c * 2`: the page has to say parentheses."""
    text = f"a = b = c = g = 1\ndef f():\n    {body}\n"
    assert "parentheses" in fails("edit-mismatch", text, replacing(old, new)).what


@pytest.mark.parametrize(
    ("edit", "body"),
    [
        (replacing("a", "b"), "return c"),
        (replacing("a", "b"), "return a + a"),
        (replacing("a", "b", times=2), "return a"),
        (replacing("x = 1", "x = 2"), "x = 1\n    x = 1"),
        (replacing("if a:", "if b:"), "while a:\n        pass"),
        (replacing("k=1", "k=2"), "return g(k=1, j=h(k=1))"),
        (replacing("k=1", "k=2"), "return g(k=3)"),
        (inserting("x = 1", before="return b"), "return a"),
        (inserting("x = 1", before="if a:"), "while a:\n        pass"),
        (inserting("x = 1", before="if a:"), "if a:\n        pass\n    if a:\n        g()"),
        (inserting("x = 1", before="else:"), "if a:\n        pass\n    else:\n        pass"),
        (inserting("x = 1", after="y = 1"), "y = 1\n    y = 1"),
        (adding_argument("g", "k=1"), "return h(1)"),
        (adding_argument("g", "k=1"), "return g(g(1))"),
    ],
)
def test_place_that_is_not_there_exactly_as_often_as_said(edit: Any, body: str) -> None:
    """Nothing matched, or one place too many, is an error and never a text."""
    error = fails("edit-mismatch", f"a = b = c = g = h = 1\ndef f():\n    {body}\n", edit)
    assert "edit of page page does" in error.what and "`cppmega diff page`" in error.next


def test_inserting_and_adding() -> None:
    text = "g = print\ndef f(x):\n    y = x\n    return g(x)  # end\n"
    assert edited(text, inserting("z = y", after="y = x")) == text.replace(
        "    return", "    z = y\n    return"
    )
    assert edited(text, inserting("z = x", before="y = x")) == text.replace(
        "    y = x", "    z = x\n    y = x"
    )
    held = "def f(x):\n    y = x\n    for z in y:\n        pass\n    else:\n        return\n"
    for line, place in (
        (2, {"before": "for z in y:"}),
        (1, {"before": "y = x\nfor z in y:"}),
        (6, {"after": "for z in y:"}),
    ):
        assert edited(held, inserting("w = x", **place)).splitlines().index("    w = x") == line
    added = appending("def twice(self): return 2 * self.x()")
    holder = "class C:\n    def x(self):\n        return 1\n"
    assert edited(holder, added, "C") == f"{holder}\n    def twice(self): return 2 * self.x()\n"
    assert edited(text, appending("print(y)")) == f"{text}    print(y)\n"
    fails("edit-mismatch", "def f(x): return x\n", appending("print(x)"))
    assert "g(x, k=1)" in edited(text, adding_argument("g", "k=1"))
    assert "def f(x, k=None):" in edited(text, adding_parameter("k=None"))
    both = in_order(adding_parameter("k=None"), adding_argument("g", "k=k"))
    assert "g(x, k=k)" in edited(text, both)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (
            replacing("g(x, True)", "0"),
            "the nearest is `g(x, False)`, with `False` instead of `True`",
        ),
        (replacing("keep=1", "keep=2"), "the nearest is `keep=3`, with `3` instead of `1`"),
        (
            inserting("pass", before="if x is not None:"),
            "the nearest is `if x is None:`, with no `not`",
        ),
        (inserting("pass", after="y = g(x)"), "`y = g(x, False)`, with `, False` added"),
        (inserting("pass", before="y = g(x, False)\nh(keep=3)"), "not as one piece of code"),
        (replacing("unlike(anything)", "0"), "the page declares 1."),
    ],
)
def test_a_mismatch_names_the_nearest(edit: Any, said: str) -> None:
    text = "g = h = print\ndef f(x):\n    y = g(x, False)\n    if x is None:\n        h(keep=3)\n"
    assert said in fails("edit-mismatch", text, edit).what


@pytest.mark.parametrize(
    ("edit", "line"),
    [
        (adding_parameter("p=0", before="y"), "def f(x, p=0, y=1, *, z):"),
        (adding_parameter("p=0", after="y"), "def f(x, y=1, p=0, *, z):"),
        (adding_parameter("p", before="x"), "def f(p, x, y=1, *, z):"),
        (adding_parameter("p", before="z"), "def f(x, y=1, *, p, z):"),
        (adding_parameter("p", after="z"), "def f(x, y=1, *, z, p):"),
        (adding_argument("g", "p", before="x"), "    return g(p, x, y=y)"),
        (adding_argument("g", "p", after="x"), "    return g(x, p, y=y)"),
        (adding_argument("g", "p=0", before="y"), "    return g(x, p=0, y=y)"),
        (adding_argument("g", "p=0", after="y"), "    return g(x, y=y, p=0)"),
    ],
)
def test_a_place_among_parameters_and_arguments(edit: Any, line: str) -> None:
    text = "g = p = print\ndef f(x, y=1, *, z):\n    return g(x, y=y)\n"
    assert line in edited(text, edit).splitlines()


@pytest.mark.parametrize(
    ("call", "left"),
    [
        ("g(x, k=1)", "g(x)"),
        ("g(k=1, x=x)", "g(x=x)"),
        ("g(k=1)", "g()"),
        ("g(h(x, k=1), j=2)", "g(h(x), j=2)"),
        ("g(\n        x,\n        k=1,\n    )", "g(\n        x,\n    )"),
    ],
)
def test_a_keyword_argument_is_deleted(call: str, left: str) -> None:
    text = f"g = h = print\ndef f(x):\n    return {call}\n"
    assert edited(text, replacing("k=1", "")) == text.replace(call, left)


def test_a_place_that_is_not_there() -> None:
    text = "g = print\ndef f(x):\n    return g(x, y=x)\n"
    assert "it has x" in fails("edit-mismatch", text, adding_parameter("p=0", before="q")).what
    assert "it has x, y" in fails("edit-mismatch", text, adding_argument("g", "1", after="q")).what


def test_parameters_keep_their_kinds() -> None:
    assert "(x, *, y, k=1)" in edited("def f(x, *, y):\n    pass\n", adding_parameter("k=1"))
    many = "def f(\n    x,\n    y=2,\n):\n    pass\n"
    assert compile(edited(many, adding_parameter("k=1")), "x", "exec")


def ours(x):  # type: ignore[no-untyped-def]
    """Ours."""
    return -x


def test_bodies_and_definitions_come_from_the_page() -> None:
    text = '@staticmethod\ndef f(x, y=1):\n    """Upstream\'s."""\n    return x\n'
    assert edited(text, body_of(ours)) == text.replace("return x", "return -x")
    whole = edited(text, definition_of(ours))
    assert "@staticmethod\ndef f(x):" in whole and '"""Ours."""' in whole
    one_line = edited("def f(x): return x\n", body_of(ours))
    assert one_line.endswith("    return -x\n")


def test_page_linters_are_not_written_along() -> None:
    assert "type: ignore" not in function_source.function_text(ours)


# -- what an edit may not do --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda node: node, "changes nothing"),
        (lambda node: None, "something other"),
        (lambda node: cst.RemoveFromParent(), "something other"),
        (lambda node: cst.parse_statement("x = 1"), "something other"),
        (lambda node: node.with_changes(name=cst.Name("g")), "something other"),
        (lambda node: 1 / 0, "ZeroDivisionError"),
        (lambda node: cst.parse_module("def"), "ParserSyntaxError"),
        (replacing("else:", "elif x:"), "raises"),
    ],
)
def test_bad_edit_has_a_name(edit: Any, said: str) -> None:
    """Whatever a page's edit does, the user reads which page it was."""
    assert said in fails("bad-edit", PLAIN, edit).what


def test_edit_that_only_changes_a_comment_changes_nothing() -> None:
    def comment(node: Any) -> Any:
        return cst.parse_statement('def f(x):\n    """Doc."""\n    # a comment\n    return x\n')

    fails("bad-edit", PLAIN, comment)


def test_edit_whose_result_it_would_edit_again() -> None:
    """The second pass must change nothing: what comes out is no text that the page knows."""
    minus = pin(b"def f(x):  # patched by cppmega: page\n    return -x\n", "f")
    pins = {"1": pin(PLAIN.encode(), "f"), "2": minus}
    broken = Step("page", Edit(f"{A}:f", pins, replacing("return x", "return -x")), marked=False)
    with pytest.raises(CppmegaError) as caught:
        rewrite.rewrite(PLAIN.encode(), A, [broken])
    assert "edit again" in caught.value.what
    other = Step(
        "page", Edit(f"{A}:f", {}, replacing("return x", "return -x")), False, frozenset({minus})
    )
    with pytest.raises(CppmegaError):
        rewrite.rewrite(PLAIN.encode(), A, [other])


@pytest.mark.parametrize(
    ("edit", "name"),
    [
        (replacing("return x", "return y"), "y"),
        (replacing("return x", "D = d_v\nreturn D"), "d_v"),
        (replacing("return x", "del x\nreturn helper(x)"), "helper, x"),
        (inserting("print(z)\nz = 1", before="return x"), "z"),
    ],
)
def test_undefined_names_are_refused(edit: Any, name: str) -> None:
    """The earlier overlay wrote `D = d_v` with no `d_v`: a NameError in the first backward."""
    assert f"names: {name}." in fails("undefined-name", PLAIN, edit).what


def test_upstream_own_undefined_names_do_not_matter() -> None:
    text = "def g():\n    return nowhere\n\n\ndef f(x):\n    return nowhere + x\n"
    assert "-nowhere" in edited(text, replacing("nowhere + x", "-nowhere"))


def test_names_inside_the_target_are_seen() -> None:
    text = "class C:\n    y = 1\n\n    def f(self):\n        def g():\n            return 1\n"
    fails("undefined-name", text, replacing("return 1", "return y"), symbol="C.f.g")
    assert "return C" in edited(text, replacing("return 1", "return C"), "C.f.g")


def test_leading_comment_above_a_decorator_is_outside() -> None:
    """The lines of a target begin with its first decorator."""

    def comment(node: Any) -> Any:
        above = cst.EmptyLine(comment=cst.Comment("# ours"))
        return replacing("return x", "return -x")(node.with_changes(leading_lines=[above]))

    with pytest.raises(CppmegaError) as caught:
        edited("@staticmethod\n" + PLAIN, comment)
    assert caught.value.name == "edit-reaches-beyond-its-target"


def test_second_definition_of_the_target_is_refused() -> None:
    """An edit that leaves two definitions of one name."""

    def twice(node: Any) -> Any:
        inner = node.with_changes(leading_lines=[])
        return node.with_changes(body=cst.IndentedBlock([inner, inner]))

    def same(node: Any) -> Any:
        return node.with_changes(body=node.body.with_changes(body=[*node.body.body] * 2))

    text = b"class C:\n    def f(self):\n        pass\n"
    with pytest.raises(CppmegaError) as caught:
        rewrite.rewrite(text, A, [step(same, "C"), step(twice, "C.f")])
    assert caught.value.name == "edit-mismatch" and "`cppmega diff page`" in caught.value.next


# -- everything together ------------------------------------------------------------------------


def test_targets_in_one_file_do_not_disturb_each_other(lab: Lab) -> None:
    lab.wheel()
    lab.page("a_tail", f"{A}:tail", 'replacing("str(x)", "repr(x)")')
    lab.page("b_double")
    lab.page("c_forward", f"{A}:Layer.forward", 'replacing("return y", "return y + 1")')
    lab.page("d_backward", f"{A}:Layer.backward", 'replacing("return g", "return -g")')
    assert lab.apply().ok
    assert lab.value("Layer().forward(3)") == 7
    assert lab.value("Layer().backward(3)") == -3
    assert lab.value("tail('x')") == "'x'/1"
    original, patched = FILES[A].decode(), lab.text()
    for line in original.splitlines():
        if "return" not in line:
            assert line in patched
    lab.revert()
    lab.pristine()


def test_result_does_not_depend_on_the_process(lab: Lab) -> None:
    """Byte for byte the same, whatever the order of sets in this interpreter."""
    lab.wheel()
    for name, target in (("one", "double"), ("two", "tail"), ("three", "Layer.backward")):
        lab.page(name, f"{A}:{target}", 'adding_parameter("extra=None")')
    code = f"""
import sys, hashlib
from pathlib import Path
from cppmega.catalogue import loader as catalogue
from cppmega.overlay import verbs as overlay
catalogue.builtin_folder = lambda: Path({str(lab.pages)!r})
session = overlay.Session(Path({str(lab.root)!r}))
outcome = overlay.apply(session, check=True, environment={{}})
print(outcome.digest)
"""
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**lab.environment(), "PYTHONHASHSEED": seed, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(digests) == 1


def test_targets_that_share_their_lines_are_refused(lab: Lab) -> None:
    """Cutting by lines would take other code along."""
    lab.files[A] = b"x = 1; \\\n\\\n\ndef double(x): return x + x\n"
    lab.page(pins={"1.0": "0" * 16})
    lab.export()
    assert lab.refused().state == "drifted"


LIBRARY: dict[str, Callable[[], Callable[[Any], Any]]] = {
    "body_of": lambda: body_of(_double),
    "definition_of": lambda: definition_of(_double),
    "replacing": lambda: replacing("x + x", "2 * x"),
    "a head": lambda: replacing("if x:", "if x is not None:"),
    "inserting": lambda: inserting("y = x", before="return x + x"),
    "appending": lambda: appending("raise ValueError"),
    "a keyword": lambda: replacing("end=1", "end=2"),
    "inserting at a head": lambda: inserting("y = x", before="if x:"),
    "adding_argument": lambda: adding_argument("print", "flush=True"),
    "adding_parameter": lambda: adding_parameter("y=None"),
}
TEXT = "def f(x):\n    if x:\n        print(x, end=1)\n    return x + x\n"


def _double(x: Any) -> Any:
    return 2 * x


@pytest.mark.parametrize("name", LIBRARY)
def test_edits_of_the_library_need_no_second_call(name: str) -> None:
    """Each gives equal answers, and the given node stays as it was."""
    edit = LIBRARY[name]()
    assert edit.__module__ == in_order(edit, edit).__module__ == "cppmega.edits"
    node = cst.parse_module(TEXT).body[0]
    one, other = (cst.Module([edit(node)]).code for _ in range(2))
    assert one == other != TEXT
    assert cst.Module([node]).code == TEXT


def test_a_function_of_a_page_is_called_twice() -> None:
    own = in_order(replacing("x + x", "2 * x"), lambda node: node)
    assert own.__module__ == __name__
