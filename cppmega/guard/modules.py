"""The code in memory, compared with what the imports have left.

Compared are what names mean, what these objects run, and what other modules hold under the names
that they have copied. What this does not detect is listed in README.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

from cppmega.errors import CppmegaError
from cppmega.guard import allowed, compiled_forms, expected, imports
from cppmega.guard.imports import function
from cppmega.guard.objects import MISSING, Change, Pin, layers, parts


def check() -> None:
    """Compare the whole process with what its files say.

    Raises:
        CppmegaError: `stale-bytecode`, `foreign-module`, `stale-code`.
    """
    for error in _unrecorded():
        raise error
    first = counted([_error(*wrong) for wrong in _wrong()])
    if first is not None:
        raise first


def counted(errors: Sequence[CppmegaError]) -> CppmegaError | None:
    """The first of some errors, with the number of the others; None if there is none."""
    if not errors:
        return None
    first, more = errors[0], f" ({len(errors) - 1} more)" if len(errors) > 1 else ""
    return CppmegaError(first.name, first.what + more, first.why, first.next)


def _unrecorded() -> Iterator[CppmegaError]:
    """Record what was loaded unseen; errors for modules that cannot be recorded."""
    compared = {one.module.__name__ for one in imports.WATCHED.records if one.kind != "other"}
    compared |= imports.WATCHED.own
    for name, module in imports.in_question():
        if imports.recorded(module) is None:
            file = getattr(module, "__dict__", {}).get("__file__")
            if (
                name in compared
                or name.partition(".")[0] in imports.PACKAGES
                or imports.is_patched(file)
            ):
                if isinstance(module, types.ModuleType):
                    imports.record(module, now=False)
                if name in compared and imports.recorded(module) is None and not _is_lazy(module):
                    yield in_memory(name)
    for one in imports.WATCHED.records:
        if one.code.stale:
            yield stale_bytecode(one.code.stale, one.path)
        package, _, leaf = one.module.__name__.rpartition(".")
        held = getattr(sys.modules.get(package), "__dict__", {}).get(leaf)
        if (
            isinstance(held, types.ModuleType)
            and imports.recorded(held) is None
            and not _is_lazy(held)
        ):
            yield in_memory(f"{one.module.__name__}, as an attribute of {package},")


def _is_lazy(module: object) -> bool:
    return type(module).__module__ == "importlib.util"


def in_memory(name: str) -> CppmegaError:
    """The error for a module that no file holds."""
    return CppmegaError(
        "foreign-module",
        f"{name} was created in memory and put into sys.modules.",
        "No file holds the code that would train, so that no hash identifies it.",
        "find the code that assigns sys.modules[...], and import the module instead",
    )


def stale_bytecode(cached: str, file: str) -> CppmegaError:
    """The error for bytecode that Python runs, and that its source does not compile to."""
    return CppmegaError(
        "stale-bytecode",
        f"{cached} holds different code from {file}, and Python uses it.",
        "The source is not what trains.",
        f"rm {cached}",
    )


def _wrong() -> Iterator[tuple[str, Change]]:
    """Everything that differs and is not allowed: the place, and the difference."""
    seen: set[int] = set()
    for one in imports.WATCHED.records:
        for change in one.changes(seen):
            if not _is_accepted(change):
                yield f"{one.path}:{_symbol(change)}", change
    for module, name, then, now in _wrong_copies():
        change = Change((name,), then, now)
        if not _is_accepted(change):
            yield f"the copy {name} in module {module}", change


def _wrong_copies() -> Iterator[tuple[str, str, Any, Any]]:
    """Module, name, the object that it should be, and the one that it is."""
    homes = _definitions()

    def right(thing: Any) -> list[Any]:
        home = homes.get(thing.__module__)
        return home.get(thing.__qualname__, []) if home is not None else []

    for one in imports.WATCHED.records:
        names = vars(one.module)
        for name, then in one.aliases.items() if one.bound else ():
            if names.get(name, MISSING) is not then.thing and right(then.thing):
                yield one.module.__name__, name, then.thing, names.get(name, MISSING)
    for module in _modules_with_copies():
        for name, thing in [*vars(module).items()]:
            kind = type(thing)
            if kind is types.FunctionType or issubclass(kind, type):
                known = right(thing)
                is_one = not known or any(thing is one for one in known)
                if not is_one and not _is_a_layer(thing, known):
                    yield module.__name__, name, known[-1], thing


def _modules_with_copies() -> Iterator[types.ModuleType]:
    """Megatron's modules, ours, and those of the run's script; not those of installed packages."""
    installed_here = imports.installed_here()
    for name, module in imports.in_question():
        if type(module) is types.ModuleType:
            file = vars(module).get("__file__")
            ours = name.partition(".")[0] in (*imports.PACKAGES, "cppmega")
            if ours or not (isinstance(file, str) and file.startswith(installed_here)):
                yield module


def _definitions() -> dict[str, dict[str, list[Any]]]:
    """Module -> name -> the objects of its imports, of patched files and of our own."""
    homes: dict[str, dict[str, list[Any]]] = {}
    for one in imports.WATCHED.records:
        if one.kind != "other":
            home = homes.setdefault(one.module.__name__, {})
            for name, pinned in one.pins.items():
                if name in one.code.codes:
                    home.setdefault(name, []).append(pinned.thing)
    return homes


def _is_a_layer(thing: Any, right: list[Any]) -> bool:
    """Whether a thing is the plain function below a decorator, which also appears by itself."""
    return any(thing is layer for one in right for layer in layers(one))


def _is_accepted(change: Change) -> bool:
    then, now = change.then, change.now
    if now is MISSING:
        return False  # a name that is gone
    if isinstance(now, types.CodeType):
        same = isinstance(then, types.CodeType) and expected.same_code(then, now)
        return same or allowed.is_allowed(now, _symbol(change))
    if id(now) in imports.WATCHED.accepted:
        return True
    if then is not MISSING:
        one, other = function(now), function(then)
        if compiled_forms.is_compiled(one, other) or _is_copy(one, other):
            imports.WATCHED.accepted[id(now)] = Pin(now)
            return True
    return allowed.is_allowed(now, _symbol(change))


def _is_copy(now: Any, then: Any) -> bool:
    """Whether a function or class is a copy by value, as those that cloudpickle sends elsewhere."""
    if type(now) is types.FunctionType and type(then) is types.FunctionType:
        return _same_parts(parts(now), parts(then))
    if isinstance(now, type) and isinstance(then, type) and now.__name__ == then.__name__:
        return _same_parts(_methods(now), _methods(then))
    return False


def _same_parts(now: dict[str, Any], then: dict[str, Any]) -> bool:
    same_labels = now.keys() == then.keys()
    return same_labels and all(_same_part(name, now[name], then[name]) for name in now)


def _same_part(label: str, now: Any, then: Any) -> bool:
    if label == "(code)":
        return expected.same_code(now, then)
    if label.startswith(("(defaults)", "default of ")):
        return bool(now == then)
    return now is then or _is_copy(now, then)


def _methods(cls: type) -> dict[str, Any]:
    return {
        name: function(value)
        for name, value in vars(cls).items()
        if isinstance(function(value), types.FunctionType)
    }


def _symbol(change: Change) -> str:
    """The name that has changed, without the inner parts of its object."""
    return ".".join(part for part in change.path if part.isidentifier())


def _error(where: str, change: Change) -> CppmegaError:
    key, part = allowed.key(change.now), change.path[-1]
    if change.now is MISSING:
        what = "is gone"
    elif part.isidentifier():
        what = f"is {allowed.describe(change.now)}"
    else:
        what = f"was changed in place: its {part.strip('()')} is {allowed.describe(change.now)}"
    allow = f"; if it is intended: python -m cppmega.run --allow-wrapper {key} ..." if key else ""
    tool = _loader(where)
    cure = f"keep {tool} off Megatron" if tool else "find the code that assigns that name"
    return CppmegaError(
        "stale-code",
        f"{where} {what}{f', loaded by {tool}' * bool(tool)}. It is not what a clean import of its "
        "file gives.",
        "The patch is on disk, but different code runs.",
        cure + allow,
    )


def _loader(where: str) -> str:
    """The import hook that loaded a module, if it was neither Python's nor this package's."""
    for one in imports.WATCHED.records:
        if where.startswith(f"{one.path}:"):
            kind = type(getattr(one.module, "__loader__", None))
            if kind.__module__.partition(".")[0] not in ("_frozen_importlib_external", "cppmega"):
                return f"{kind.__module__}.{kind.__qualname__}"
    return ""
