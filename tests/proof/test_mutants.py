"""Proofs notice mutants of what their pages bring; `python -m tests.mutants` proves all of them."""

from __future__ import annotations

import ast
import random
import textwrap

import pytest

from tests import forkserver, mutants
from tests.support import VERSIONS, laws
from tests.support.mutations import Source
from tests.support.weekly import weekly

KILLED = 4
"""So many mutants a proof must notice, or all that its page has."""
SECONDS = 40.0
"""Of the CPU, after which the sample begins no page; the command proves every page."""


def _changed(
    text: str, lines: range | None = None, stock: str = "", dropped: tuple[str, ...] = ()
) -> list[str]:
    """The kind and the first changed line of each mutant."""
    text = textwrap.dedent(text).strip() + "\n"
    before = ast.unparse(ast.parse(text)).splitlines()
    chosen = range(1, len(text.splitlines()) + 1) if lines is None else lines
    source = Source("f.py", text, frozenset(chosen), stock, frozenset(dropped))
    found = []
    for place in range(len([*source.mutants()])):
        mutant = [*source.mutants()][place]  # a tree is changed in its place: each has its own
        after = ast.unparse(mutant.tree()).splitlines()
        new = [line.strip() for line in after if line not in before]
        found.append(f"{mutant.kind}: {new[0] if new else ''}")
    return found


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("if a:\n    return b", ["negated: if not a:"]),
        ("return b if a else c", ["negated: return b if not a else c"]),
        ("return [x for x in a if x]", ["negated: return [x for x in a if not x]"]),
        ("return a and b", ["without `a`: return b", "without `b`: return a"]),
        ("return a < b", ["compared otherwise: return a <= b"]),
        ("return a is None", ["compared otherwise: return a is not None"]),
        ("a += b\nreturn a", ["dropped: pass"]),
        ("a.b = c\nreturn a", ["dropped: pass"]),
        ("a.add(c)\nreturn a", ["dropped: pass"]),
        ("return a + b", ["without `b`: return a"]),
        ("return getattr(a, 'b', c)", ["state ignored: return c"]),
        ("d = a.b\nreturn d", ["state ignored: d = None"]),
        ("return b(a.c)", ["without `a.c`: return b(None)"]),
        ("return b(c=a.c)", ["state ignored: return b(c=None)"]),
        ("return b(True)", ["the other: return b(False)"]),
        ("return b(1)", ["one more: return b(2)"]),
        ("a.b()", ["dropped: pass", "emptied: pass"]),
        ("print(a)\nreturn c", []),
        ("_cppmega_reached('page')\nreturn c", []),
        ("raise ValueError(a + b)\nreturn c", []),
        ("d: int | None = c\nreturn d", []),
    ],
)
def test_every_kind_of_mutant(body: str, found: list[str]) -> None:
    assert _changed("def f(a, b, c):\n" + textwrap.indent(body, "    ")) == found


def test_only_lines_of_the_page_change() -> None:
    text = "def f(a):\n    a += 1\n    a += 2\n    return a\n"
    assert _changed(text, range(3, 4)) == ["dropped: pass", "one more: a += 3"]


def test_changes_of_upstream_are_taken_back_one_by_one() -> None:
    stock = "def f(a):\n    b = g(a)\n    c = h(b)\n    return c\n"
    text = "def f(a):\n    b = g2(a)\n    c = h(b)\n    return k(c)\n"
    assert _changed(text, stock=stock) == ["taken back: b = g(a)", "taken back: return c"]


def test_what_a_page_removes_comes_back() -> None:
    stock = "def f(a):\n    b = g(a)\n    a.log()\n    return b\n"
    text = "def f(a):\n    b = g(a)\n    return b\n"
    assert _changed(text, range(0), stock, ("a.log()",)) == ["taken back: a.log()"]
    assert _changed(text, range(0), stock) == []  # another page's


@weekly
@pytest.mark.slow
@pytest.mark.megatron
def test_proofs_notice_mutants() -> None:
    """A sample of the pages, which every change of a page draws again."""
    version, pages = VERSIONS[-1], laws.pages()
    names = [name for name in laws.needed(version) if pages[name].patch.needs == ("cpu",)]
    random.Random("".join(page.text for page in pages.values())).shuffle(names)
    options = ("--until", str(KILLED), "--seconds", str(SECONDS))
    found = [*mutants.prove(version, names, *options, python=forkserver.executable())]
    assert found, "not one page in time"
    weak = {
        one.page: [one.problem, *one.survived]
        for one in found
        if one.problem or (len(one.killed) < KILLED and one.survived)
    }
    assert not weak
