"""`refuses` of a page is code of the page: watched like its other answers."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from cppmega.errors import CppmegaError
from cppmega.page import Page, Patch
from cppmega.preflight.checks import page_limits


def _page(refuses: Any) -> Page:
    patch = Patch((), "forward", refuses=refuses)
    return Page("page", patch, "", "r", "page.py", "builtin")


def _limit(args: Namespace, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[CppmegaError]:
    yield CppmegaError("too-wide", f"{args.width} of {shapes}", "It fails.", "narrow it")


def _starts(args: Namespace, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[CppmegaError]:
    os.system("true")
    yield from ()


@pytest.mark.parametrize(
    ("refuses", "said"),
    [(lambda args, shapes: 1 / 0, "ZeroDivisionError"), (_starts, "starts a process")],
)
def test_a_limit_that_fails_names_its_page(refuses: Any, said: str) -> None:
    with pytest.raises(CppmegaError) as caught:
        page_limits._refused(_page(refuses), Namespace(), {})
    assert caught.value.name == "bad-refuses" and said in caught.value.what


def test_what_a_page_refuses_is_passed_on() -> None:
    (refused,) = page_limits._refused(_page(_limit), Namespace(width=3), {})
    assert refused.name == "too-wide"
