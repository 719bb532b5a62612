"""A rule of a page is code of the page: watched like its other answers."""

from __future__ import annotations

import os
from argparse import Namespace
from typing import Any

import pytest

from cppmega.catalogue import page_rules
from cppmega.errors import CppmegaError
from cppmega.page import Page, Patch
from cppmega.rules.rule import Rule, Run


def _page(when: Any) -> Page:
    rule = Rule(
        concerns="widths",
        name="too-wide",
        when=when,
        what="It is {width} wide, by {by} too much.",
        why="It fails.",
        cure="narrow it",
    )
    return Page("page", Patch((), "forward", rules=(rule,)), "", "r", "page.py", "builtin")


@pytest.mark.parametrize(
    ("when", "said"),
    [(lambda run: 1 / 0, "ZeroDivisionError"), (lambda run: os.system("true"), "starts a process")],
)
def test_a_rule_that_fails_names_its_page(when: Any, said: str) -> None:
    with pytest.raises(CppmegaError, match=said) as caught:
        page_rules.broken([_page(when)], Run(Namespace()))
    assert caught.value.name == "page-failed"


def test_what_a_page_states_is_passed_on() -> None:
    page = _page(lambda run: run.width > 2 and {"by": run.width - 2})
    (error,) = page_rules.broken([page], Run(Namespace(width=3)))
    assert (error.name, error.what) == ("too-wide", "It is 3 wide, by 1 too much.")
    assert not page_rules.broken([page], Run(Namespace(width=2)))
