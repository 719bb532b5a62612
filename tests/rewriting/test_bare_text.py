"""The bare text that is cut out of a definition's lines is the one that libcst prints."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given

import cppmega
from cppmega.rewriting import codegen, fingerprint, source
from cppmega.rewriting.bare_text import bare_text
from tests.rewriting.test_properties import QUICK, Module, modules


def _below(scope: ast.AST) -> Iterator[source.Definition]:
    for definition in source.definitions(scope):
        yield definition
        yield from _below(definition)


def _pairs(data: bytes) -> Iterator[tuple[str | None, str]]:
    """Both texts of every definition of a file: cut out of its lines, and printed by libcst."""
    text = source.decode(data, "a.py")
    tree = source.parse(text, "a.py")
    for definition in _below(tree):
        where = source.span(tree, text, definition)
        lines = "".join(text.lines[where.start : where.end])
        printed = codegen.bare(fingerprint.parse_definition(lines)[1])
        yield bare_text(lines, definition, where.start), printed


_LAYOUTS = [
    "@a(1)  # c\n# c\n\n@b\ndef f(x,  # c\n\n      # c\n      y=(1,\n   2)):  # c\n    return x\n",
    'class A:\n    """Doc."""\n\n    def f(self):\n        "Alone."\n        # c\n\n    x = 1  \n',
    'def f():\n    ("doc"\n     "more")  # c\n    return 1\n',
    'def f():\n    b"bytes"\n',
    'def f(): "no block"\n',
    "def f(x):\n    return x + \\\n  1  # c\n",
    "def f(x):\n    y = '''a\n  # no comment  \n\n'''  # c\n    return y\n",
    "class A:\n    def f(self):\n        return (self.x\n    .y,\n        # c\n        2)\n",
    "def f(x):\n    '''Doc\n    of two lines.'''\n    'not a docstring'\n    return x\n",
    "def f(x):\n    if x:\n        pass\n    # c\n    else:  # c\n        return f'{x}'  # c\n",
    "def f(x):\n    x = [  # c\n        1,  # c\n\n    ]; y = 2\n    return {'a': x, 'b': y}\n",
    "if 1:\n    async def f(x):\n        async with x as y: pass\n        return r'\\\\' + y\n",
]


@pytest.mark.parametrize("body", _LAYOUTS)
def test_layouts(body: str) -> None:
    found = list(_pairs(body.encode()))
    assert found and all(cut == printed for cut, printed in found)


_LEFT = [
    "def f(x):\n  return x\n",
    "def f(x):\n\treturn x\n",
    "def f(x):\r\n    return x\r\n",
    "def f(x):\n    if x:\n            return x\n",
    "def f(x):\n    'doc'; return x\n",
    "def f(x):\n    return f'''{x}\n    # c\n'''\n",
    "def f(x):\n    return x \\\n\n",
]
if sys.version_info >= (3, 12):
    _LEFT += ['def f(x):\n    return f"{x["#"]}"  # c\n']


@pytest.mark.parametrize("body", _LEFT)
def test_unusual_layouts_are_left_to_libcst(body: str) -> None:
    text = source.decode(body.encode(), "a.py")
    (definition,) = source.definitions(source.parse(text, "a.py"))
    assert bare_text(body, definition, 0) is None
    assert fingerprint.of_lines(body, definition, 0) == fingerprint.of_source(body)


@given(modules())
@QUICK
def test_made_modules(module: Module) -> None:
    assert all(cut in (None, printed) for cut, printed in _pairs(module.data))


def test_real_files() -> None:
    """Nearly all definitions of real code are cut out; libcst is asked for hardly any."""
    found = []
    for file in sorted(Path(cppmega.__file__).parent.rglob("*.py"))[::9]:
        found += list(_pairs(file.read_bytes()))
    assert all(cut in (None, printed) for cut, printed in found)
    assert len(found) > 100 and sum(cut is None for cut, _ in found) < len(found) / 50
