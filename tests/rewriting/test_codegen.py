"""The texts of nodes, and what may be answered without them, are those of libcst and tokenize."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import libcst as cst
import pytest

import cppmega
from cppmega.edits import replacing
from cppmega.errors import CppmegaError
from cppmega.page import Edit
from cppmega.rewriting import code_text, codegen, node_edits, rewrite

_TEXT = '''\
@wrapped(1)  # a comment
def f(x, y=(1,
            2)):
    """Doc."""

    def inner():
        "Doc alone."
    # a comment
    z = """a
  # no comment
"""  # one
    if x:
        return [y,  # the first

                z]
    class A: pass
    return f"{x!r:>{y}}"
'''


def _definition(text: str) -> tuple[cst.Module, Any]:
    module = cst.parse_module(text)
    return module, module.body[0]


@pytest.mark.parametrize("indent", ["    ", "  ", "\t"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_all_of_a_node_and_its_code(indent: str, newline: str) -> None:
    text = _TEXT.replace("    ", indent).replace("\n", newline)
    module, node = _definition(text)
    whole = codegen.text(node, module.default_indent, module.default_newline)
    assert whole == text == module.code
    below = codegen.text(node, module.default_indent, module.default_newline, margin=indent)
    block = cst.If(test=cst.Name("x"), body=cst.IndentedBlock([node]))
    assert f"if x:{newline}{below}" == module.with_changes(body=[block]).code


# -- different at a glance -------------------------------------------------------------------------


def _empty(node: Any) -> Any:
    return node.with_changes(body=node.body.with_changes(body=[]))


def _documented(node: Any) -> Any:
    doc = cst.parse_statement('"Another."')
    return node.with_changes(body=node.body.with_changes(body=[doc, *node.body.body[1:]]))


def _in_parentheses(node: Any) -> Any:
    return replacing("x.y", "x.y")(node)


@pytest.mark.parametrize(
    ("text", "edit"),
    [
        ("def f(x):\n    pass\n", _empty),
        ('def f(x):\n    "Doc."\n    return x\n', _documented),
        ("def f(x):\n    return x.y\n", _in_parentheses),
    ],
)
def test_other_trees_of_the_same_code_change_nothing(text: str, edit: Any) -> None:
    """Where trees differ and texts do not, only the texts count."""
    node = _definition(text)[1]
    assert not node_edits.differ(edit(node), node)
    step = rewrite.Step("page", Edit("a.py:f", {}, edit), marked=True)
    with pytest.raises(CppmegaError, match="changes nothing"):
        rewrite.rewrite(text.encode(), "a.py", [step])


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("return x", "return y"),
        ("return x", "return x.y"),
        ("return x", "y = x\n    return y"),
        ("return 'a'", "return 'b'"),
    ],
)
def test_other_code_is_seen_at_a_glance(one: str, two: str) -> None:
    nodes = [_definition(f"def f(x):\n    {body}\n")[1] for body in (one, two)]
    assert node_edits.differ(*nodes)


# -- strings and comments --------------------------------------------------------------------------

_LITERALS = [
    "x = 'a' # b\ny = \"#\" '''\n# no\n''' # yes\n",
    "x = r'\\' # '\ny = 1 # c\n",
    "x = 'a\\\n# no' # yes\n",
    "x = f'{a} # no' # yes\n",
    "x = f'''{a}\n# no\n''' # yes\n",
    "x = f'{{' # yes\n",
    'x = """a"b""c\\"""" # yes\n',
]
if sys.version_info >= (3, 12):
    _LITERALS += ['x = f"{d["#"]}" # yes\n', "x = f'''{\na # inside\n}''' # yes\n"]


@pytest.mark.parametrize("text", _LITERALS)
def test_strings_and_comments_are_those_of_the_tokenizer(text: str) -> None:
    inside, cuts = code_text._strings_and_comments(text)
    wanted_inside, wanted_cuts = code_text._by_tokens(text)
    assert (inside, sorted(cuts)) == (wanted_inside, sorted(wanted_cuts))


def test_strings_and_comments_of_real_files() -> None:
    for file in sorted(Path(cppmega.__file__).parent.rglob("*.py"))[::6]:
        text = file.read_text()
        inside, cuts = code_text._strings_and_comments(text)
        wanted_inside, wanted_cuts = code_text._by_tokens(text)
        assert (inside, sorted(cuts)) == (wanted_inside, sorted(wanted_cuts)), file
