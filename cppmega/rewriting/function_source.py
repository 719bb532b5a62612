"""The source of a page's function, as it is written into a Megatron file."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from functools import lru_cache
from typing import Any

_LINTER_COMMENT = re.compile(r"[ \t]+# (?:noqa|type: ignore|fmt: )[^\n]*")


@lru_cache(maxsize=256)
def function_text(function: Callable[..., Any]) -> str:
    """Return the source of a page's function, without its comments for linters."""
    text = textwrap.dedent(inspect.getsource(function))
    return without_linter_comments(text).rstrip() + "\n"


def without_linter_comments(text: str) -> str:
    """Return code without the comments that concern linters."""
    return _LINTER_COMMENT.sub("", text)
