"""What the tests of edits share: one edit of a text, and the error that it ends in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cppmega.errors import CppmegaError
from cppmega.page import Edit
from cppmega.rewriting import marks, rewrite
from cppmega.rewriting.rewrite import Step
from tests.support.lab import A

PLAIN = "def f(x):\n    return x\n"


def step(edit: Callable[[Any], Any], symbol: str = "double", **more: Any) -> Step:
    return Step("page", Edit(f"{A}:{symbol}", {}, edit, **more), marked=False)


def edited(text: str, edit: Callable[[Any], Any], symbol: str = "f", **more: Any) -> str:
    """The text with one edit, without the comment that names the page."""
    done = rewrite.rewrite(text.encode(), A, [step(edit, symbol, **more)])
    return done.data.decode().replace(f"  # {marks.COMMENT}page", "")


def fails(name: str, text: str, edit: Callable[[Any], Any], **more: Any) -> CppmegaError:
    with pytest.raises(CppmegaError) as caught:
        edited(text, edit, **more)
    assert caught.value.name == name
    assert "page" in caught.value.what or name == "helper-name-taken"
    return caught.value
