"""Ask the rules of every run, and those of pages, about arguments."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from cppmega.catalogue import page_rules
from cppmega.errors import CppmegaError
from cppmega.rules.rule import Run
from tests.support import pages


def broken(
    *names: str,
    saved: Mapping[str, tuple[int, ...]] | None = None,
    variables: Mapping[str, str] | None = None,
    **args: Any,
) -> list[CppmegaError]:
    """The errors of a run: by the rules of every run, and by those of these pages alone."""
    run = Run(Namespace(**args), variables or {}, saved=saved)
    return page_rules.broken([pages()[name] for name in names], run)
