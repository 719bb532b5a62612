"""Copies of patched functions and classes in other modules: `from MODULE import NAME`.

A copy keeps the object that the name had when it was copied. It is correct if that object came from
a checked import, or was installed by the overlay itself.
"""

from __future__ import annotations

import ast
import functools
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cppmega.guard import file_facts
from cppmega.guard.pinned import Pin, layers
from cppmega.tree import installed

PACKAGES = tuple(installed.PACKAGES.values())
"""The packages whose modules run in training."""


class Names:
    """The definitions of all patched modules, and every object that is correct for one of them."""

    def __init__(self) -> None:
        self.definitions: dict[str, dict[str, list[Pin]]] = {}
        """Name -> module that defines it -> the results of its imports."""
        self.modules: set[str] = set()
        self.right: dict[int, Pin] = {}

    def add(self, module: str, name: str, pinned: Pin) -> None:
        """Add a definition of a patched module."""
        self.modules.add(module)
        self.definitions.setdefault(name, {}).setdefault(module, []).append(pinned)
        self.learn(pinned.thing)

    def learn(self, thing: Any) -> None:
        """Accept another object under these names."""
        self.right[id(thing)] = Pin(thing)

    def claimed(self, thing: Any) -> list[Pin]:
        """The objects that a function or class may be, by its name; [] if it is not patched."""
        if thing.__module__ not in self.modules:
            return []
        return self.definitions.get(thing.__qualname__, {}).get(thing.__module__, [])

    def imported(self, module: types.ModuleType, name: str, thing: Any) -> list[Pin]:
        """The objects that a name may be if the module imports it from a patched module."""
        if id(thing) in self.right or getattr(thing, "__module__", None) == module.__name__:
            return []
        for _ in range(10):  # packages re-export names in their `__init__`
            file = vars(module).get("__file__") or ""
            source, name = _imports(file, module.__name__).get(name, ("", ""))
            if source in self.definitions.get(name, {}):
                return self.definitions[name][source]
            if source not in sys.modules:
                return []
            module = sys.modules[source]
        return []


def wrong_copies(names: Names) -> Iterator[tuple[str, str, Any, Any]]:
    """Yield module, name, the object that it should be, and the one that it is."""
    for module in list(sys.modules.values()):
        if type(module) is not types.ModuleType:
            continue
        trains = module.__name__.partition(".")[0] in PACKAGES
        for name, thing in list(vars(module).items()):
            right = []
            if type(thing) is types.FunctionType or issubclass(type(thing), type):
                right = names.claimed(thing)
            if not right and trains and name in names.definitions and callable(thing):
                right = names.imported(module, name, thing)
            if right and id(thing) not in names.right and not _is_a_layer(thing, right):
                yield module.__name__, name, right[-1].thing, thing


def _is_a_layer(thing: Any, right: list[Pin]) -> bool:
    """Whether a thing is the plain function below a decorator, which also appears by itself."""
    return any(thing is layer for one in right for layer in (one.thing, *layers(one.thing)))


@functools.cache
def _imports(file: str, module: str) -> dict[str, tuple[str, str]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return {}
    return file_facts.imports_of(tree, module, Path(file).name == "__init__.py")
