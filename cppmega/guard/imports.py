"""What the imports of watched files have left in this process, and whether it is their code.

A module is recorded right after its body has run, whoever loaded it, or at the first check. Its
functions and methods must be those that its file compiles to.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any, Literal

from cppmega.guard import compiled_forms, expected, import_hook
from cppmega.guard.expected import Expected
from cppmega.guard.objects import (
    MISSING,
    Change,
    Pin,
    changes,
    is_fixed,
    layers,
    pin,
    runs,
)
from cppmega.tree import installed

PACKAGES = tuple(installed.PACKAGES.values())
"""The packages whose modules run in training."""
_WATCHED_PACKAGES = frozenset((*PACKAGES, "cppmega"))
_INSIDE = tuple(f"/{package}/" for package in PACKAGES)

Kind = Literal["patched", "ours", "other"]
"""A patched file; a module of this package that patched text reaches; any other of Megatron."""


@dataclass(slots=True, eq=False)
class Record:
    """A module as its import has left it."""

    kind: Kind
    path: str
    """Its file, as messages name it."""
    module: types.ModuleType
    code: Expected
    pins: dict[str, Pin] = field(default_factory=dict)
    """Names whose meaning is compared: in a patched file all that is fixed, else definitions."""
    functions: list[tuple[tuple[str, ...], Pin, types.CodeType]] = field(default_factory=list)
    """Of a file without patches: its functions and methods, with the code that each had."""
    aliases: dict[str, Pin] = field(default_factory=dict)
    """Names that mean functions and classes of other modules."""
    wrong: list[Change] = field(default_factory=list)
    """Definitions that are not those of the file."""
    bound: bool = True
    """False after a reload: the names then mean new objects; these may live on in copies."""

    def changes(self, seen: set[int]) -> Iterator[Change]:
        """Every difference from the result of a clean import of the file."""
        yield from self.wrong
        for path, function, code in self.functions:
            if function.thing.__code__ is not code:
                yield Change((*path, "(code)"), code, function.thing.__code__)
        if self.kind == "other":
            return
        if type(self.module) is not types.ModuleType:
            yield Change(("__class__",), types.ModuleType, type(self.module))
            return
        now = vars(self.module)
        for name, pinned in self.pins.items():
            live = now.get(name, MISSING) if self.bound else pinned.thing
            for change in changes(pinned, live, seen):
                yield Change((name, *change.path), change.then, change.now)
        if self.kind == "patched" and self.bound:
            for name in now.keys() & self.pins["__builtins__"].thing.keys() - self.pins.keys():
                if not name.startswith("__"):
                    yield Change((name,), MISSING, now[name])


@dataclass
class Watched:
    """The files that this process must run as they are on disk, and what it has imported."""

    hooked: bool = False
    patched: set[str] = field(default_factory=set)
    """Real paths of patched files."""
    basenames: set[str] = field(default_factory=set)
    """Their last parts, by which most other files are told apart at once."""
    own: set[str] = field(default_factory=set)
    """Names of the modules of this package that patched text reaches."""
    records: list[Record] = field(default_factory=list)
    """Every import of a watched file, including modules since dropped."""
    by_module: dict[int, Record] = field(default_factory=dict)
    elsewhere: dict[str, Any] = field(default_factory=dict)
    """Modules of other installed packages, by the name under which each was seen."""
    in_question: dict[str, Any] = field(default_factory=dict)
    """All others that were seen."""
    accepted: dict[int, Pin] = field(default_factory=dict)
    """Objects that the overlay itself, or torch, has put in the place of recorded ones."""


WATCHED = Watched()


def watch(patched: Iterable[Path], own: Iterable[str]) -> None:
    """Record every module of Megatron, and these, from now on.

    Args:
        patched: the patched files.
        own: names of the modules of this package that patched text reaches.
    """
    if not WATCHED.hooked:
        WATCHED.hooked = True
        import_hook.add(import_hook.Hook(wants=_is_watched, after=_executed))
    WATCHED.patched = {os.path.realpath(path) for path in patched}
    WATCHED.basenames = {path.rpartition("/")[2] for path in WATCHED.patched}
    WATCHED.own = set(own)
    WATCHED.elsewhere.clear()
    WATCHED.in_question.clear()


def in_question() -> list[tuple[str, Any]]:
    """What `sys.modules` holds, without the modules of other installed packages.

    There are thousands of these. Each module is told from them once, unless it is replaced.
    """
    elsewhere, asked = WATCHED.elsewhere, WATCHED.in_question
    held = [one for one in [*sys.modules.items()] if elsewhere.get(one[0]) is not one[1]]
    new = [(name, module) for name, module in held if asked.get(name) is not module]
    for name, module in new:
        (elsewhere if _is_elsewhere(name, module) else asked)[name] = module
    return [one for one in held if elsewhere.get(one[0]) is not one[1]] if new else held


def _is_elsewhere(name: str, module: Any) -> bool:
    if type(module) is not types.ModuleType or name in WATCHED.own:
        return False
    if name.partition(".")[0] in _WATCHED_PACKAGES:
        return False
    names = vars(module)
    origin, file = getattr(names.get("__spec__"), "origin", None), names.get("__file__")
    return isinstance(file, str) and all(map(_is_of_another_package, {origin or file, file}))


@functools.cache
def installed_here() -> tuple[str, ...]:
    """The folders of the standard library and of installed packages."""
    return tuple(f"{sysconfig.get_path(kind)}/" for kind in ("stdlib", "purelib", "platlib"))


def _is_of_another_package(file: str) -> bool:
    if not file.startswith(installed_here()):
        return False
    return not any(part in file for part in _INSIDE) and not is_patched(file)


def _executed(module: types.ModuleType) -> None:
    record(module, now=True)


def record(module: types.ModuleType, *, now: bool) -> None:
    """Record a module as it is, if its import has filled it.

    Args:
        module: the module.
        now: whether its body has just run, so that nothing else can have changed it.
    """
    if type(module) is not types.ModuleType:
        return  # a lazy module: it is recorded when something has used it
    file = vars(module).get("__file__")
    if not isinstance(file, str) or not file.endswith(".py"):
        return
    try:
        data = Path(file).read_bytes()
    except OSError:
        return  # `files` reports it
    earlier = WATCHED.by_module.get(id(module))
    if earlier is not None:
        earlier.bound = False
    kind: Kind = "ours" if module.__name__ in WATCHED.own else "other"
    kind = "patched" if is_patched(file) else kind
    loader = getattr(module, "__loader__", None)
    loaded = now and kind == "other" and type(loader) is SourceFileLoader
    new = Record(kind, file, module, expected.of_source(Path(file), data, loaded=loaded))
    if kind == "other":
        new.functions = [*_functions(module)]
        new.aliases = {n: Pin(v) for n, v in vars(module).items() if isinstance(v, _NAMED)}
        new.wrong = [
            Change((*path, "(code)"), MISSING, code)
            for path, _, code in new.functions
            if new.code.codes and not (new.code.has(code) or _is_generated(code))
        ]
    else:
        _pin(new)
        new.wrong = [*_not_of_the_file(new)]
    WATCHED.records.append(new)
    WATCHED.by_module[id(module)] = new


def recorded(module: object) -> Record | None:
    """The record of a module's latest import; None if it has none."""
    return WATCHED.by_module.get(id(module))


def ours() -> list[Record]:
    """The records of this package's own modules that are in use."""
    return [one for one in WATCHED.records if one.kind == "ours" and one.bound]


def replace(owner: Any, name: str, new: Any) -> None:
    """Assign a name of a recorded module or class on behalf of the overlay."""
    setattr(owner, name, new)
    expect(owner, name)


def expect(owner: Any, name: str) -> None:
    """Make the check expect, from now on, the current value of a name."""
    value = vars(owner)[name]
    WATCHED.accepted[id(value)] = Pin(value)
    for one in WATCHED.records:
        if owner is one.module and name in one.pins:
            one.pins[name] = pin(value, functools.partial(_is_own, one))
            one.wrong = [change for change in one.wrong if change.path[0] != name]
        elif _is_own(one, owner):  # other modules record no part of it
            for pinned in _pins_of(one, owner):
                pinned.parts[name] = pin(value, functools.partial(_is_own, one))


def _is_watched(spec: ModuleSpec) -> bool:
    top = spec.name.partition(".")[0]
    return top in PACKAGES or spec.name in WATCHED.own or is_patched(spec.origin)


def is_patched(file: object) -> bool:
    """Whether a module's `__file__` is a patched file, whatever the module is called."""
    if not isinstance(file, str) or file.rpartition("/")[2] not in WATCHED.basenames:
        return False
    return _real(file) in WATCHED.patched


@functools.cache
def _real(file: str) -> str:
    return os.path.realpath(file)


_NAMED = (type, types.FunctionType)


def _functions(module: types.ModuleType) -> Iterator[tuple[tuple[str, ...], Pin, types.CodeType]]:
    """The functions of a module, and the methods of its classes, with their code."""
    names = vars(module)
    for name, value in names.items():
        own = isinstance(value, type) and value.__module__ == module.__name__
        for label, member in vars(value).items() if own else ((None, value),):
            inner = function(member)
            if type(inner) is types.FunctionType and inner.__globals__ is names:
                yield (name, label) if label else (name,), Pin(inner), inner.__code__


def _pin(one: Record) -> None:
    """Record what the names of a module mean: all that is fixed, or its own definitions."""
    patched = one.kind == "patched"
    state = expected.state(one.code) if patched else set[str]()
    seen: dict[int, Pin] = {}
    for name, value in vars(one.module).items():
        if patched and name == "__builtins__":
            one.pins[name] = Pin(value)
        elif name.startswith("__") or name in state:
            continue
        elif _is_defined_here(one, name, value):
            one.pins[name] = pin(value, functools.partial(_is_own, one), seen)
        elif patched and is_fixed(value):
            one.pins[name] = Pin(value)
        elif isinstance(value, _NAMED):
            one.aliases[name] = Pin(value)
    for pinned in seen.values():
        if isinstance(pinned.thing, type):
            for label, part in [*pinned.parts.items()]:
                if not runs(part.thing) and (label in state or not patched):
                    del pinned.parts[label]


def _is_defined_here(one: Record, name: str, value: Any) -> bool:
    own = type(value) is types.FunctionType and value.__globals__ is vars(one.module)
    return own or _is_own(one, value) or (name in one.code.codes and runs(value))


def _is_own(one: Record, value: Any) -> bool:
    return isinstance(value, type) and value.__module__ == one.module.__name__


def _pins_of(one: Record, owner: type) -> Iterator[Pin]:
    """The pins of a class in the record of its module."""
    pending, seen = [*one.pins.values()], set[int]()
    while pending:
        pinned = pending.pop()
        if id(pinned) not in seen:
            seen.add(id(pinned))
            pending += pinned.parts.values()
            if pinned.thing is owner and pinned.parts:
                yield pinned


def times_pinned(thing: Any) -> int:
    """The number of pins of an object in all records."""
    pins: list[Pin] = []
    for one in WATCHED.records:
        pins += [
            *one.pins.values(),
            *one.aliases.values(),
            *(function for _, function, _ in one.functions),
        ]
    pins += WATCHED.accepted.values()
    seen: dict[int, Pin] = {}
    while pins:
        one_pin = pins.pop()
        if id(one_pin) not in seen:
            seen[id(one_pin)] = one_pin
            pins += one_pin.parts.values()
    return sum(one_pin.thing is thing for one_pin in seen.values())


def _not_of_the_file(one: Record) -> Iterator[Change]:
    """Definitions whose code is not what the file compiles to.

    A definition without a decorator must be exactly that; one with a decorator must contain it, and
    its other layers must come from an installed package or from Megatron.
    """
    plain = expected.plain(one.code)
    for name, pinned in one.pins.items():
        if name not in one.code.codes:
            continue
        thing = pinned.thing
        if not isinstance(thing, type):
            yield from _judged(one, name, thing, plain)
        elif _is_own(one, thing):
            for label, member in vars(thing).items():
                if f"{name}.{label}" in one.code.codes:
                    yield from _judged(one, f"{name}.{label}", member, plain)


_WRAPPED_BY_TYPE = ("__new__", "__init_subclass__", "__class_getitem__")
"""Methods of which Python itself makes static and class methods."""


def _judged(one: Record, name: str, thing: Any, plain: set[str]) -> Iterator[Change]:
    path = tuple(name.split("."))
    thing = compiled_forms.innermost(function(thing) if path[-1] in _WRAPPED_BY_TYPE else thing)
    if name in plain:
        if type(thing) is not types.FunctionType or thing.__globals__ is not vars(one.module):
            yield Change(path, MISSING, thing)
        elif not one.code.has(thing.__code__, name):
            yield Change((*path, "(code)"), MISSING, thing.__code__)
        return
    for layer in layers(thing) if is_fixed(thing) else ():
        if type(layer) is types.FunctionType and layer.__globals__ is vars(one.module):
            if not one.code.has(layer.__code__) and not _is_generated(layer.__code__):
                yield Change((*path, "(code)"), MISSING, layer.__code__)
        elif not _comes_from_a_package(layer):
            yield Change(path, MISSING, layer)


def _is_generated(code: types.CodeType) -> bool:
    return code.co_filename.startswith("<")


def _comes_from_a_package(thing: Any) -> bool:
    """Whether an object is of an installed package, of Megatron, of ours, or has no source."""
    if type(thing) is types.FunctionType:
        if _is_generated(thing.__code__):
            return True
        return _lies_in_a_package(thing.__code__.co_filename)
    home = sys.modules.get((thing if isinstance(thing, type) else type(thing)).__module__)
    file = getattr(home, "__file__", None)
    return home is not sys.modules.get("__main__") and (
        not isinstance(file, str) or _lies_in_a_package(file)
    )


def _lies_in_a_package(file: str) -> bool:
    return _real(file).startswith(_folders(len(sys.modules)))


@functools.lru_cache(maxsize=1)
def _folders(_modules: int) -> tuple[str, ...]:
    """The folders of the standard library, of packages, of Megatron and ours; and of torch."""
    folders = [*installed_here()]
    folders += filter(_holds_packages, sys.path)
    parts = (f"megatron.{part}" for part in installed.PARTS)  # all that a mapping finder gives
    for package in (*PACKAGES, *parts, "torch", "cppmega"):
        folders += getattr(sys.modules.get(package), "__path__", None) or ()
    return tuple(os.path.realpath(folder) + os.sep for folder in folders)


@functools.cache
def _holds_packages(folder: str) -> bool:
    """Whether packages were installed into a folder of sys.path, as `pip install --target` does."""
    return any(Path(folder or ".").glob("*.dist-info"))


def function(thing: Any) -> Any:
    """The function of a static or class method; anything else is returned as it is."""
    return thing.__func__ if isinstance(thing, staticmethod | classmethod) else thing
