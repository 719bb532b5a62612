"""A fingerprint is of the code, and of nothing else."""

from __future__ import annotations

import pytest

from cppmega.rewriting import fingerprint


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    return x\n",
        "def f(x):  # c\n\n    # c\n    return x  # c\n",
        'def f(x):\n    """Doc."""\n    return x\n',
        'def f(x):\n    "Doc" "string"\n\n    return x\n',
        "    def f(x):\n        # c\n        return x\n",
        "\tdef f(x):\n\t\treturn x\n",
        "def f(x):\r\n    return x\r\n",
        "def f(x):\n  return x",
    ],
)
def test_fingerprint_ignores_layout(text: str) -> None:
    assert fingerprint.of_source(text) == fingerprint.of_source("def f(x):\n    return x\n")


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("def f(x):\n    return x\n", "def f(x):\n    return y\n"),
        ("def f(x):\n    return x\n", "async def f(x):\n    return x\n"),
        ("def f(x):\n    return x\n", "@a\ndef f(x):\n    return x\n"),
        ("def f(x):\n    return '# a'\n", "def f(x):\n    return '# b'\n"),
        ("def f(x):\n    return '''\n\n'''\n", "def f(x):\n    return '''\n'''\n"),
        ('def f(x):\n    f"{g()}"\n    return x\n', "def f(x):\n    return x\n"),
        ('def f(x):\n    "a" f"{g()}"\n    return x\n', "def f(x):\n    return x\n"),
        ("def f(x):\n    x\n    'doc'\n", "def f(x):\n    x\n"),
    ],
)
def test_fingerprint_sees_code(one: str, two: str) -> None:
    """Also what looks like a docstring or a comment and is none."""
    assert fingerprint.of_source(one) != fingerprint.of_source(two)


def test_bare_text_keeps_strings_and_joined_lines() -> None:
    text = (
        "  @a(1)  # c\n  # c\n  async def f(x,\n\n      # c\n     y=(1,\n   2)):  # c\n"
        "    ('Doc'\n     'umented.')  # c\n"
        "    y = ''' a\n   # no comment  \n\n'''  # c\n"
        "    z = x + \\\n  1  # c\n"
        "    class A:\n     'Alone.'\n     # c\n"
        '    if x:  \n            return f"{x}"; y\n'
    )
    assert fingerprint.bare(text) == (
        "@a(1)\nasync def f(x,\n   y=(1,\n 2)):\n"
        "    y = ''' a\n   # no comment  \n\n'''\n"
        "    z = x + \\\n  1\n"
        "    class A:\n        pass\n"
        '    if x:\n        return f"{x}"; y\n'
    )
