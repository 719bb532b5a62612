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
