"""Ask the rules of every run, and those of pages, about arguments."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from cppmega.errors import CppmegaError
from cppmega.rules import RULES
from cppmega.rules.rule import Run, errors
from tests.support import pages


def broken(
    *names: str,
    saved: Mapping[str, tuple[int, ...]] | None = None,
    variables: Mapping[str, str] | None = None,
    **args: Any,
) -> list[CppmegaError]:
    """The errors of a run: by the rules of every run, and by those of these pages alone."""
    known = pages()
    rules = [*RULES, *(rule for name in names for rule in known[name].patch.rules)]
    return list(errors(rules, Run(Namespace(**args), variables or {}, saved=saved)))
