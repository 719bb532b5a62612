"""Callbacks after a module has been executed, under any name and every time.

wrapt's post-import hooks fire once per name. A module that is reloaded, dropped from `sys.modules`
and imported again, or imported under a second name would come back without its runtime patch.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_HOOKED = "_cppmega_hooked"


@dataclass(frozen=True, slots=True, eq=False)
class Hook:
    """A callback for the modules that it wants."""

    wants: Callable[[ModuleSpec], bool]
    after: Callable[[ModuleType], None]
    """Called right after the module's body, before its importer sees it."""


_HOOKS: list[Hook] = []
_ASKING = threading.local()


class _Finder:
    """First on `sys.meta_path`; finds nothing itself, and attaches hooks to what others find."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        asked = _ASKING.__dict__.setdefault("names", set())
        if name in asked:  # by another such finder, which asks all the others as well
            return None
        asked.add(name)
        try:
            spec = _found_by_the_others(name, path, target)
        finally:
            asked.discard(name)
        if spec is None or not hasattr(spec.loader, "exec_module"):
            return spec
        hooks = [] if hasattr(spec.loader, _HOOKED) else [h for h in _HOOKS if h.wants(spec)]
        if hooks:
            _attach(spec, hooks)
        return spec


_FINDER = _Finder()


def add(hook: Hook) -> None:
    """Apply a hook to every module executed from now on. Hooks run in the order of this call.

    A hook that is applied already keeps its place.
    """
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    if hook not in _HOOKS:
        _HOOKS.append(hook)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Let Python search for no garbage: imports make objects that stay, and little else.

    The searches among them would take a tenth of the time of Megatron's imports.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def named(module: str) -> Callable[[ModuleSpec], bool]:
    """A predicate for the spec of the module of that name."""
    return lambda spec: spec.name == module


def _found_by_the_others(
    name: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    for finder in list(sys.meta_path):
        find = getattr(finder, "find_spec", None)
        if finder is _FINDER or find is None:
            continue
        spec: ModuleSpec | None = find(name, path, target)
        if spec is not None:
            return spec
    return None


def _attach(spec: ModuleSpec, hooks: list[Hook]) -> None:
    loader: Any = spec.loader
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        with uncollected():
            execute(module)
        for hook in hooks:
            hook.after(module)

    setattr(loader, _HOOKED, True)
    loader.exec_module = exec_module
