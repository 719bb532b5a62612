"""The installed Megatron's parser, without its three hundred lines of usage and its tracebacks."""

from __future__ import annotations

import argparse
import contextlib
import io
import traceback
from collections.abc import Callable
from typing import Any

from cppmega.errors import CppmegaError


def parsed(parse: Callable[[], Any]) -> tuple[Any, str]:
    """The arguments that a parser reads from `sys.argv`, or the reason why it refuses them.

    Raises:
        CppmegaError: what `parse` raises.
    """
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return parse(), ""
    except CppmegaError:  # of what adds arguments
        raise
    except SystemExit:
        return None, printed.getvalue().strip().rpartition("\n")[2] or "it ends the process"
    except Exception as error:  # a conversion of the parser's own, such as a table of words
        return None, f"{_argument(error)}{type(error).__name__}: {error}"


def _argument(error: Exception) -> str:
    """The argument at which the parser raised an error; empty if it was at none."""
    argument = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        action = frame.f_locals.get("action")
        if isinstance(action, argparse.Action) and action.option_strings:
            argument = f"{action.option_strings[-1]}: "
    return argument
