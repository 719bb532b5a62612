"""The code in memory, compared with the code of the files on disk.

A module is recorded right after its body has run, whoever loaded it, or at the first check. Its
functions and methods must be those that its file compiles to, and every later check compares the
module with the record: what its names mean, what these objects run, and what other modules hold
under the names that they have copied.

What this does not detect is listed in README.
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

from cppmega.errors import CppmegaError
from cppmega.guard import allowed, compiled_forms, expected, import_hook
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
class _Watched:
    """The files that this process must run as they are on disk, and what it has imported."""

    hooked: bool = False
    patched: set[str] = field(default_factory=set)
    """Real paths of patched files."""
    basenames: set[str] = field(default_factory=set)
    own: set[str] = field(default_factory=set)
    """Names of the modules of this package that patched text reaches."""
    records: list[Record] = field(default_factory=list)
    """Every import of a watched file, including modules since dropped."""
    by_module: dict[int, Record] = field(default_factory=dict)
    accepted: dict[int, Pin] = field(default_factory=dict)
    """Objects that the overlay itself, or torch, has put in the place of recorded ones."""


_WATCHED = _Watched()


def watch(patched: Iterable[Path], own: Iterable[str]) -> None:
    """Record every module of Megatron, and these, from now on.

    Args:
        patched: the patched files.
        own: names of the modules of this package that patched text reaches.
    """
    if not _WATCHED.hooked:
        _WATCHED.hooked = True
        import_hook.add(import_hook.Hook(wants=_is_watched, after=_executed))
    _WATCHED.patched = {os.path.realpath(path) for path in patched}
    _WATCHED.basenames = {path.rpartition("/")[2] for path in _WATCHED.patched}
    _WATCHED.own = set(own)


def _executed(module: types.ModuleType) -> None:
    _record(module, now=True)


def _record(module: types.ModuleType, *, now: bool) -> None:
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
    earlier = _WATCHED.by_module.get(id(module))
    if earlier is not None:
        earlier.bound = False
    kind: Kind = "ours" if module.__name__ in _WATCHED.own else "other"
    kind = "patched" if _is_patched(file) else kind
    source = Path(file)
    known = (
        now
        and kind == "other"
        and type(getattr(module, "__loader__", None)) is SourceFileLoader
        and expected.is_what_python_loads(source, data)
    )
    code = Expected(installed.sha256(data)) if known else expected.of_source(source, data)
    new = Record(kind, file, module, code)
    if kind == "other":
        new.functions = [*_functions(module)]
        new.aliases = {n: Pin(v) for n, v in vars(module).items() if isinstance(v, _NAMED)}
        new.wrong = [
            Change((*path, "(code)"), MISSING, code)
            for path, _, code in new.functions
            if not (known or new.code.has(code) or _is_generated(code))
        ]
    else:
        _pin(new)
        new.wrong = [*_not_of_the_file(new)]
    _WATCHED.records.append(new)
    _WATCHED.by_module[id(module)] = new


def recorded(module: object) -> Record | None:
    """The record of a module's latest import; None if it has none."""
    return _WATCHED.by_module.get(id(module))


def ours() -> list[Record]:
    """The records of this package's own modules that are in use."""
    return [one for one in _WATCHED.records if one.kind == "ours" and one.bound]


def replace(owner: Any, name: str, new: Any) -> None:
    """Assign a name of a recorded module or class on behalf of the overlay."""
    setattr(owner, name, new)
    expect(owner, name)


def expect(owner: Any, name: str) -> None:
    """Make the check expect, from now on, the current value of a name."""
    value = vars(owner)[name]
    _WATCHED.accepted[id(value)] = Pin(value)
    for one in _WATCHED.records:
        if owner is one.module and name in one.pins:
            one.pins[name] = pin(value, functools.partial(_is_own, one))
            one.wrong = [change for change in one.wrong if change.path[0] != name]
        elif isinstance(owner, type):
            for pinned in _pins_of(one, owner):
                pinned.parts[name] = pin(value, functools.partial(_is_own, one))


def check() -> None:
    """Compare the whole process with what its files say.

    Raises:
        CppmegaError: `stale-bytecode`, `foreign-module`, `stale-code`.
    """
    for error in _unrecorded():
        raise error
    found = [_error(*wrong) for wrong in _wrong()]
    if found:
        more = f" ({len(found) - 1} more of this kind.)" if len(found) > 1 else ""
        first = found[0]
        raise CppmegaError(first.name, first.what + more, first.why, first.next)


def _is_watched(spec: ModuleSpec) -> bool:
    top = spec.name.partition(".")[0]
    return top in PACKAGES or spec.name in _WATCHED.own or _is_patched(spec.origin)


def _is_patched(file: object) -> bool:
    if not isinstance(file, str) or file.rpartition("/")[2] not in _WATCHED.basenames:
        return False
    return os.path.realpath(file) in _WATCHED.patched


# -- what an import has left -----------------------------------------------------------------


_NAMED = (type, types.FunctionType)


def _functions(module: types.ModuleType) -> Iterator[tuple[tuple[str, ...], Pin, types.CodeType]]:
    """The functions of a module, and the methods of its classes, with their code."""
    names = vars(module)
    for name, value in names.items():
        own = isinstance(value, type) and value.__module__ == module.__name__
        for label, member in vars(value).items() if own else ((None, value),):
            function = _function(member)
            if type(function) is types.FunctionType and function.__globals__ is names:
                yield (name, label) if label else (name,), Pin(function), function.__code__


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
    """The pins of a class; a module that only imports it records no part of it."""
    pending, seen = [*one.pins.values()], set[int]()
    while pending:
        pinned = pending.pop()
        if id(pinned) not in seen:
            seen.add(id(pinned))
            pending += pinned.parts.values()
            if pinned.thing is owner and pinned.parts:
                yield pinned


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
    thing = compiled_forms.innermost(_function(thing) if path[-1] in _WRAPPED_BY_TYPE else thing)
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
    return os.path.realpath(file).startswith(_folders(len(sys.modules)))


@functools.lru_cache(maxsize=1)
def _folders(_modules: int) -> tuple[str, ...]:
    """The folders of the standard library, of packages, of Megatron and ours; and of torch."""
    found = [sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")]
    for package in (*PACKAGES, "torch", "cppmega"):
        found += getattr(sys.modules.get(package), "__path__", None) or ()
    return tuple(os.path.realpath(folder) + os.sep for folder in found)


# -- what a check compares -------------------------------------------------------------------


def _unrecorded() -> Iterator[CppmegaError]:
    """Record what was loaded unseen; errors for modules that cannot be recorded."""
    compared = {one.module.__name__ for one in _WATCHED.records if one.kind != "other"}
    compared |= _WATCHED.own
    for name, module in [*sys.modules.items()]:
        if recorded(module) is None:
            file = getattr(module, "__dict__", {}).get("__file__")
            if name in compared or name.partition(".")[0] in PACKAGES or _is_patched(file):
                if isinstance(module, types.ModuleType):
                    _record(module, now=False)
                if name in compared and recorded(module) is None and not _is_lazy(module):
                    yield in_memory(name)
    for one in _WATCHED.records:
        if one.code.stale:
            yield stale_bytecode(one.code.stale, one.path)
        package, _, leaf = one.module.__name__.rpartition(".")
        held = getattr(sys.modules.get(package), "__dict__", {}).get(leaf)
        if isinstance(held, types.ModuleType) and recorded(held) is None and not _is_lazy(held):
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
    for one in _WATCHED.records:
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

    for one in _WATCHED.records:
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
    installed_here = tuple(f"{sysconfig.get_path(kind)}/" for kind in ("stdlib", "purelib"))
    for name, module in [*sys.modules.items()]:
        if type(module) is types.ModuleType:
            file = vars(module).get("__file__")
            ours = name.partition(".")[0] in (*PACKAGES, "cppmega")
            if ours or not (isinstance(file, str) and file.startswith(installed_here)):
                yield module


def _definitions() -> dict[str, dict[str, list[Any]]]:
    """Module -> name -> the objects of its imports, of patched files and of our own."""
    found: dict[str, dict[str, list[Any]]] = {}
    for one in _WATCHED.records:
        if one.kind != "other":
            home = found.setdefault(one.module.__name__, {})
            for name, pinned in one.pins.items():
                if name in one.code.codes:
                    home.setdefault(name, []).append(pinned.thing)
    return found


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
    if id(now) in _WATCHED.accepted:
        return True
    if then is not MISSING:
        one, other = _function(now), _function(then)
        if compiled_forms.is_compiled(one, other) or _is_copy(one, other):
            _WATCHED.accepted[id(now)] = Pin(now)
            return True
    return allowed.is_allowed(now, _symbol(change))


def _is_copy(now: Any, then: Any) -> bool:
    """Whether a function or class is a copy by value, as those that cloudpickle sends elsewhere."""
    if type(now) is types.FunctionType and type(then) is types.FunctionType:
        return expected.same_code(now.__code__, then.__code__) and _same_parts(now, then)
    if isinstance(now, type) and isinstance(then, type) and now.__name__ == then.__name__:
        mine, theirs = _methods(now), _methods(then)
        return mine.keys() == theirs.keys() and all(
            _is_copy(mine[name], theirs[name]) for name in mine
        )
    return False


def _same_parts(now: types.FunctionType, then: types.FunctionType) -> bool:
    cells = [[cell.cell_contents for cell in one.__closure__ or ()] for one in (now, then)]
    pairs = zip(*cells, strict=True)
    return (
        (now.__defaults__, now.__kwdefaults__) == (then.__defaults__, then.__kwdefaults__)
        and len(cells[0]) == len(cells[1])
        and all(a is b or _is_copy(a, b) for a, b in pairs)
    )


def _methods(cls: type) -> dict[str, Any]:
    return {
        name: _function(value)
        for name, value in vars(cls).items()
        if isinstance(_function(value), types.FunctionType)
    }


def _function(thing: Any) -> Any:
    return thing.__func__ if isinstance(thing, staticmethod | classmethod) else thing


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
    for one in _WATCHED.records:
        if where.startswith(f"{one.path}:"):
            kind = type(getattr(one.module, "__loader__", None))
            if kind.__module__.partition(".")[0] not in ("_frozen_importlib_external", "cppmega"):
                return f"{kind.__module__}.{kind.__qualname__}"
    return ""
