"""Megatron's own steps, logs and checkpoints, watched without the script's help."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from cppmega.guard import import_hook, live_code

MODULE = "megatron.training.training"

Before = Callable[[], None]
After = Callable[[Any], None]


def nothing() -> None:
    """Check nothing, for instance before a log."""


def install(around: Mapping[str, tuple[Before, After]]) -> None:
    """Wrap functions of Megatron's training module whenever it is imported.

    Args:
        around: by the name of a function, a callback before it, and one after it that gets the
            run's arguments.
    """

    def wrap(module: ModuleType) -> None:
        # train() looks these names up in its own module, so replacing them there is enough.
        for name, (before, after) in around.items():
            live_code.replace(module, name, _around(getattr(module, name), before, after))

    import_hook.add(import_hook.Hook(import_hook.named(MODULE), after=wrap))


def _around(function: Callable[..., Any], before: Before, after: After) -> Callable[..., Any]:
    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        before()
        result = function(*args, **kwargs)
        after(importlib.import_module("megatron.training.global_vars").get_args())
        return result

    return watched
