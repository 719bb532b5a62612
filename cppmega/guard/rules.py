"""The rules of a run, asked in a rank about the arguments that its script has parsed."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

from cppmega.catalogue import page_rules
from cppmega.errors import CppmegaError
from cppmega.guard.held import Guard
from cppmega.rules.rule import Run


def broken(guard: Guard) -> CppmegaError | None:
    """The first rule that this run breaks; None if none is, or no arguments are known."""
    args = arguments_of(guard)
    if args is None:
        return None
    pages = (guard.session.pages[name] for name in guard.receipt.pages)
    errors = page_rules.broken(pages, Run(args, os.environ))
    return errors[0] if errors else None


def arguments_of(guard: Guard) -> Any:
    """The arguments that a custom loop has given, else those that Megatron has parsed."""
    if guard.arguments is not None:
        return guard.arguments
    variables: Any = sys.modules.get("megatron.training.global_vars")
    with contextlib.suppress(Exception):  # it asserts that there are some
        return variables.get_args() if variables is not None else None
    return None
