"""Detect and undo the changes that code of a page makes to this process."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter, is_not, ne
from types import CodeType, FunctionType, ModuleType
from typing import Any

OF_FILES = ("_cppmega_pages_", "cppmega_recipe_")
"""Name prefixes of modules that are loaded by path; such a module may be loaded again."""
_RELIED_ON = ("builtins", "os", "posixpath", "ast", "hashlib", "json", "pathlib", "re", "tokenize")
"""Modules outside this package whose functions decide what is written."""
_OF_SYS = ("excepthook", "unraisablehook", "stderr", "stdout", "exit", "modules", "meta_path")


@dataclass(slots=True)
class _Found:
    """What was found last; most of it is found again."""

    referents: list[Any] = field(default_factory=list)
    """What functions refer to."""
    code: list[CodeType] = field(default_factory=list)
    """Their code, which is among it."""
    modules: list[str] = field(default_factory=list)
    """The names of all modules."""
    guarded: list[str] = field(default_factory=list)
    """Those of the guarded ones."""


_last = _Found()


@dataclass(frozen=True, slots=True)
class Footprint:
    """The state of the process that page code must not change."""

    environment: dict[str, str]
    path: list[str]
    arguments: list[str]
    of_sys: list[Any]
    modules: dict[str, ModuleType]
    names: dict[str, dict[str, Any]]
    """Module -> its names, for the modules of the engine and those that it relies on."""
    functions: list[FunctionType]
    code: list[CodeType]
    """The code objects of `functions`."""
    classes: list[type]
    attributes: list[dict[str, Any]]
    """The attributes of `classes`."""
    traced: tuple[Any, Any]

    @classmethod
    def now(cls) -> Footprint:
        """Record the state before the code runs."""
        guarded = _guarded()
        functions, classes = _definitions(tuple(guarded.items()))
        return cls(
            dict(os.environ),
            list(sys.path),
            list(sys.argv),
            [getattr(sys, name) for name in _OF_SYS],
            dict(sys.modules),
            {name: vars(module).copy() for name, module in guarded.items()},
            functions,
            _code(functions),
            classes,
            [vars(one).copy() for one in classes],
            (sys.getprofile(), sys.gettrace()),
        )

    def restore(self) -> str:
        """Undo what the code changed.

        Returns:
            a description of the first change; empty if there was none.
        """
        return next((what for what in [*self._restored()] if what), "")

    def _restored(self) -> Iterator[str]:
        changed = sorted(_differing(self.environment, dict(os.environ)))
        if changed:
            os.environ.clear()
            os.environ.update(self.environment)
            yield f"changes the environment ({', '.join(changed)})"
        for mine, theirs, label in (
            (self.path, sys.path, "sys.path"),
            (self.arguments, sys.argv, "sys.argv"),
        ):
            if mine != theirs:
                theirs[:] = mine
                yield f"changes {label}"
        for name, value in zip(_OF_SYS, self.of_sys, strict=True):
            if getattr(sys, name) is not value:
                setattr(sys, name, value)
                yield f"replaces sys.{name}"
        if any(map(is_not, map(sys.modules.get, self.modules), self.modules.values())):
            yield from self._restored_modules()
        if any(vars(self.modules[name]) != before for name, before in self.names.items()):
            yield from self._restored_names()
        if _code(self.functions) != self.code:
            yield from self._restored_code()
        if any(map(ne, map(vars, self.classes), self.attributes)):
            yield from self._restored_attributes()
        if (sys.getprofile(), sys.gettrace()) != self.traced:
            sys.setprofile(self.traced[0])
            sys.settrace(self.traced[1])
            yield "watches what the process calls (sys.setprofile, sys.settrace)"

    def _restored_modules(self) -> Iterator[str]:
        for name, module in self.modules.items():
            if sys.modules.get(name) is not module and not name.startswith(OF_FILES):
                sys.modules[name] = module
                yield f"replaces the module {name}"

    def _restored_names(self) -> Iterator[str]:
        for module, before in self.names.items():
            now = vars(self.modules[module])
            for name in _differing(before, now):
                if name in before:
                    now[name] = before[name]
                    yield f"changes {module}.{name}"
                elif module == "builtins":  # elsewhere: a submodule that was imported
                    del now[name]
                    yield f"adds {name} to Python's builtins"

    def _restored_code(self) -> Iterator[str]:
        for function, code in zip(self.functions, self.code, strict=True):
            if function.__code__ is not code:
                function.__code__ = code
                yield f"changes the code of {function.__module__}.{function.__qualname__}"

    def _restored_attributes(self) -> Iterator[str]:
        for one, before in zip(self.classes, self.attributes, strict=True):
            for name in _differing(before, vars(one)):
                if name in before:
                    setattr(one, name, before[name])
                elif name == "__annotations__":  # created on first access
                    continue
                else:
                    delattr(one, name)
                yield f"changes {one.__module__}.{one.__qualname__}.{name}"


def _code(functions: list[FunctionType]) -> list[CodeType]:
    """The code objects of functions.

    Python announces each reading of `__code__` to audit hooks, of which we have one, and what the
    garbage collector reads, once for all functions. What was found last is found again in less time
    if every object is the same one: what is only equal may be a page's own idea of equality.
    """
    referents = gc.get_referents(*functions)
    same = len(referents) == len(_last.referents)
    if not same or any(map(is_not, referents, _last.referents)):
        code = [held for held in referents if type(held) is CodeType]
        exact = len(code) == len(functions)
        _last.code = code if exact else [*map(attrgetter("__code__"), functions)]
        _last.referents = referents
    return _last.code


def _guarded() -> dict[str, ModuleType]:
    """The modules of the engine and those that it relies on; only new names are looked at."""
    names = list(sys.modules)
    known = len(_last.modules)
    if names[:known] != _last.modules:
        known, _last.guarded = 0, []
    _last.guarded += filter(_is_guarded, names[known:])
    _last.modules = names
    return {name: sys.modules[name] for name in _last.guarded}


def _is_guarded(name: str) -> bool:
    return name.startswith("cppmega.") or name in _RELIED_ON or name == "cppmega"


@lru_cache(maxsize=2)
def _definitions(
    modules: tuple[tuple[str, ModuleType], ...],
) -> tuple[list[FunctionType], list[type]]:
    """Find the functions, methods and classes that the modules of the engine define."""
    functions: list[FunctionType] = []
    classes: list[type] = []
    for name, module in modules:
        for value in vars(module).values() if name.startswith("cppmega") else ():
            if getattr(value, "__module__", None) == name:
                inside = vars(value).values() if isinstance(value, type) else (value,)
                functions += [inner for inner in inside if isinstance(inner, FunctionType)]
                classes += [value] if isinstance(value, type) else []
    return functions, classes


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Names whose values are neither the same object nor equal strings."""
    missing = object()
    names = {**before, **now}
    pairs = [(name, before.get(name, missing), now.get(name, missing)) for name in names]
    return [name for name, old, new in pairs if old is not new and not _same_text(old, new)]


def _same_text(old: Any, new: Any) -> bool:
    return isinstance(old, str) and old == new
