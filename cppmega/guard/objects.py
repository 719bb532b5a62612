"""The code that a call of an object runs, recorded so that any later change can be named.

A pin holds the object itself and the parts that determine its behavior: of a function its code
object, defaults and closure; of a class its bases, metaclass and attributes; of a descriptor or a
partial the function that it calls. Mutable values (lists, dictionaries, tensors) are state and are
left out.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

MISSING: Any = object()

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...))
_DESCRIPTORS = (staticmethod, classmethod, property, functools.cached_property)
_PARTIALS = (functools.partial, functools.partialmethod)
_FIXED = frozenset((*_PLAIN, *_DESCRIPTORS, *_PARTIALS, types.ModuleType, types.CodeType))


@dataclass(slots=True, eq=False)
class Pin:
    """An object as it was recorded.

    Records hold objects by pins only, so that a search for references to an object can distinguish
    them from everything else.
    """

    thing: Any
    parts: dict[str, Pin] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Change:
    """A part of an object that differs from what was recorded."""

    path: tuple[str, ...]
    then: Any
    now: Any


def is_fixed(value: Any) -> bool:
    """Whether a value can be compared: code and constants can, state cannot."""
    if type(value) is tuple:
        return all(map(is_fixed, value))
    return type(value) in _FIXED or callable(value)


def runs(value: Any) -> bool:
    """Whether a value is code: something that is called, or that an attribute access calls."""
    return callable(value) or type(value) in _DESCRIPTORS


def same(then: Any, now: Any) -> bool:
    """Whether two values are one object, or equal constants of one type (`1` is not `True`)."""
    if then is now:
        return True
    if type(then) is not type(now):
        return False
    if type(then) is tuple:
        return len(then) == len(now) and all(map(same, then, now))
    return type(then) in _PLAIN and bool(then == now)


def pin(thing: Any, enters: Callable[[Any], bool], seen: dict[int, Pin] | None = None) -> Pin:
    """Record an object.

    Args:
        thing: the object.
        enters: whether to record the attributes of a class as well; the parts of functions and
            descriptors always are. Everything else is recorded by its identity.
        seen: the pins of objects that are recorded already, by identity.
    """
    seen = {} if seen is None else seen
    if id(thing) in seen:
        return seen[id(thing)]
    seen[id(thing)] = recorded = Pin(thing)
    if not isinstance(thing, type) or enters(thing):
        rebound = _rebound(thing)
        for label, part in parts(thing).items():
            if is_fixed(part) and label not in rebound:
                recorded.parts[label] = pin(part, enters, seen)
    return recorded


def parts(thing: Any) -> dict[str, Any]:
    """The parts that determine what a call of an object runs: label -> object."""
    if type(thing) is types.FunctionType:
        return _of_function(thing)
    if type(thing) in (staticmethod, classmethod, types.MethodType):
        return {"(function)": thing.__func__}
    if type(thing) is property:
        return {"(getter)": thing.fget, "(setter)": thing.fset, "(deleter)": thing.fdel}
    if type(thing) is functools.cached_property:
        return {"(function)": thing.func}
    if type(thing) in _PARTIALS:
        keywords = {f"keyword {name}": value for name, value in thing.keywords.items()}
        return {"(function)": thing.func, "(arguments)": thing.args, **keywords}
    if isinstance(thing, type):
        own = {label: value for label, value in vars(thing).items() if label != "__doc__"}
        return {"(bases)": thing.__bases__, "(metaclass)": type(thing), **own}
    return {}


_OF_PLAIN_FUNCTION = {"(code)", "(defaults)"}


def changes(pinned: Pin, live: Any, seen: set[int] | None = None) -> Iterator[Change]:
    """Every difference between the record of an object and the object that is there now."""
    if not same(pinned.thing, live):
        yield Change((), pinned.thing, live)
        live = pinned.thing  # it may still run, below a wrapper
    seen = set() if seen is None else seen
    if id(pinned) in seen or not pinned.parts:
        return
    seen.add(id(pinned))
    if pinned.parts.keys() <= _OF_PLAIN_FUNCTION:  # most pins: nothing is inside of these parts
        for label, part in pinned.parts.items():
            value = live.__code__ if label == "(code)" else live.__defaults__
            if not same(part.thing, value):
                yield Change((label,), part.thing, value)
        return
    now = parts(live)
    for label, part in pinned.parts.items():
        for change in changes(part, now.get(label, MISSING), seen):
            yield Change((label, *change.path), change.then, change.now)
    if isinstance(live, type):
        yield from _added(pinned, live, now)


def _added(pinned: Pin, cls: type, now: dict[str, Any]) -> Iterator[Change]:
    """New methods of a class, except those that it inherits anyway (typing.Protocol has some)."""
    for label, value in now.items():
        if label in pinned.parts or not runs(value):
            continue
        inherited = (vars(base).get(label, MISSING) for base in cls.__mro__[1:])
        if not any(value is other for other in inherited):
            yield Change((label,), MISSING, value)


def layers(thing: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """An object and every callable that it refers to; `__wrapped__` is only a claim."""
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(thing, type | types.ModuleType | type(None)):
        return
    seen.add(id(thing))
    yield thing
    links = parts(thing) or _attributes(thing)
    for label, link in links.items():
        if not label.startswith("default") and runs(link):
            yield from layers(link, seen)


def _attributes(thing: Any) -> dict[str, Any]:
    """Functions that a callable object holds directly, as Triton and TileLang kernels do."""
    try:
        held = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}
    return {k: v for k, v in held.items() if type(v) is types.FunctionType or k == "fn"}


def _of_function(function: types.FunctionType) -> dict[str, Any]:
    contents: dict[str, Any] = {"(code)": function.__code__, "(defaults)": function.__defaults__}
    for name, value in (function.__kwdefaults__ or {}).items():
        contents[f"default of {name}"] = value
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            contents[f"closure {name}"] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    # functools.singledispatch: the implementation for each type
    registry = getattr(function, "registry", None)
    if type(registry) is types.MappingProxyType:
        contents.update({f"implementation for {key}": value for key, value in registry.items()})
    return contents


_STORE = dis.opmap["STORE_DEREF"]


def _rebound(thing: Any) -> set[str]:
    """Closure variables that the function itself assigns: counters and caches."""
    if type(thing) is not types.FunctionType or not thing.__closure__:
        return set()
    if _STORE not in thing.__code__.co_code[::2]:  # most have none, and `dis` takes its time
        return set()
    steps = dis.get_instructions(thing.__code__)
    return {f"closure {s.argval}" for s in steps if s.opcode == _STORE}
