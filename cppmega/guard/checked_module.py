"""One execution of a patched file: compiled from bytes that were checked, and fully recorded.

Results of the file's own decorators are part of a clean import, and are recorded as they are,
provided that they come from packages that the file imports, itself or through a neighbor.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from cppmega.errors import CppmegaError
from cppmega.guard import file_facts
from cppmega.guard.compiled_forms import nested
from cppmega.guard.file_facts import Facts
from cppmega.guard.pinned import MISSING, Change, Pin, changes, is_fixed, layers, pin, runs
from cppmega.host.load_file import FromSource
from cppmega.tree.installed import sha256


@dataclass(frozen=True, slots=True)
class WatchedFile:
    """A patched file, and the bytes that it must hold."""

    path: str
    """Relative to ROOT."""
    digest: str
    pages: str
    """Names of the pages in it."""


@dataclass(slots=True, eq=False)
class CheckedModule:
    """A patched module as its execution has left it."""

    file: WatchedFile
    module: types.ModuleType
    name: str
    facts: Facts
    codes: dict[int, types.CodeType]
    """Every code object of the file."""
    pins: dict[str, Pin]
    kind: type
    """The module's class; a subclass could compute any attribute."""
    foreign: list[Change]
    """Definitions at the end of the import that do not come from the file."""
    bound: bool = True
    """False after a reload: the names then mean new objects, while these may live on in copies."""

    def changes(self) -> Iterator[Change]:
        """Every difference from the result of a clean import."""
        yield from self.foreign
        if type(self.module) is not self.kind:
            yield Change(("__class__",), self.kind, type(self.module))
        now = vars(self.module)
        seen: set[int] = set()
        for name, pinned in self.pins.items():
            live = now.get(name, MISSING) if self.bound else pinned.thing
            for change in changes(pinned, live, seen):
                yield Change((name, *change.path), change.then, change.now)
        if self.bound:
            yield from self._shadowed_builtins(now)

    def _shadowed_builtins(self, now: dict[str, Any]) -> Iterator[Change]:
        for name in now.keys() & self.pins["__builtins__"].thing.keys():
            if name not in self.pins and not name.startswith("__"):
                yield Change((name,), MISSING, now[name])


class CheckedLoader(FromSource):
    """Compiles a patched file from bytes whose hash it has just compared."""

    def __init__(
        self,
        name: str,
        path: str,
        file: WatchedFile,
        done: Callable[[CheckedModule], None],
        failed: Callable[[CppmegaError], None],
    ) -> None:
        super().__init__(name, path)
        self.file, self.done, self.failed = file, done, failed
        self.loaded = file.digest
        """SHA-256 of the source that is compiled."""

    def exec_module(self, module: types.ModuleType) -> None:
        """Execute the module and record the result.

        Raises:
            CppmegaError: `file-changed`.
        """
        code = self._compiled()
        exec(code, module.__dict__)
        self.done(record(self.file, module, code))

    def _compiled(self) -> types.CodeType:
        data = self.get_data(self.path)
        if sha256(data) != self.file.digest:
            error = file_changed(self.path, self.file.pages)
            self.failed(error)  # an importer may catch every exception
            raise error
        with warnings.catch_warnings():
            # Upstream's invalid escapes: Python itself warns once, and later reads its bytecode.
            warnings.simplefilter("ignore")
            return compile(data, self.path, "exec", dont_inherit=True)


def file_changed(path: str, pages: str) -> CppmegaError:
    """The error for a patched file whose bytes are not those that were applied."""
    return CppmegaError(
        "file-changed",
        f"{path} is not what was applied; it carries {pages}.",
        "It was changed between the check at the start and now.",
        "cppmega status",
    )


def record(file: WatchedFile, module: types.ModuleType, code: types.CodeType) -> CheckedModule:
    """Record what the execution of a file has left in its module."""
    codes = {id(each): each for each in nested(code)}
    facts = file_facts.facts_of(codes.values(), module.__name__.partition(".")[0])
    checked = CheckedModule(file, module, module.__name__, facts, codes, {}, type(module), [])
    seen: dict[int, Pin] = {}
    for name, value in vars(module).items():
        if name == "__builtins__":
            checked.pins[name] = Pin(value)
        elif is_fixed(value) and name not in facts.declared_global and not name.startswith("__"):
            checked.pins[name] = _pinned(checked, name, value, seen)
    for pinned in seen.values():
        if isinstance(pinned.thing, type):
            _forget_state(pinned, facts.assigned_attributes)
    checked.foreign = list(_foreign(checked))
    return checked


def repin(checked: CheckedModule, owner: Any, name: str) -> None:
    """Expect the current value of a name: the overlay itself has replaced it."""
    value = vars(owner)[name]
    new = pin(value, lambda cls: _is_own(checked, cls))
    if owner is checked.module:
        checked.pins[name] = new
    for pinned in _all_pins(checked):
        # A module that only imports the class records no part of it.
        if pinned.thing is owner and isinstance(owner, type) and pinned.parts:
            pinned.parts[name] = new


def _all_pins(checked: CheckedModule) -> Iterator[Pin]:
    pending, seen = list(checked.pins.values()), set[int]()
    while pending:
        pinned = pending.pop()
        if id(pinned) not in seen:
            seen.add(id(pinned))
            pending.extend(pinned.parts.values())
            yield pinned


def _pinned(checked: CheckedModule, name: str, value: Any, seen: dict[int, Pin]) -> Pin:
    function = type(value) is types.FunctionType and value.__globals__ is vars(checked.module)
    if function or _is_own(checked, value) or name in checked.facts.defined:
        return pin(value, lambda cls: _is_own(checked, cls), seen)
    return Pin(value)  # from another module: only its identity


def _is_own(checked: CheckedModule, value: Any) -> bool:
    return isinstance(value, type) and value.__module__ == checked.name


def _forget_state(pinned: Pin, assigned: set[str]) -> None:
    for label in assigned & pinned.parts.keys():
        if not runs(pinned.parts[label].thing):
            del pinned.parts[label]


def _foreign(checked: CheckedModule) -> Iterator[Change]:
    """Definitions that are, or are wrapped by, objects from elsewhere.

    The module's own text has run, so only a replaced decorator, or an assignment during the import,
    can have put them there.
    """
    trusted = _trusted_folders({*checked.facts.packages, *_bound_packages(checked.module)})
    for name in sorted(checked.facts.defined & checked.pins.keys()):
        thing = checked.pins[name].thing
        members = vars(thing) if _is_own(checked, thing) else {"": thing}
        for label, member in members.items():
            for layer in layers(member) if is_fixed(member) else ():
                if not _comes_from(layer, checked.codes, trusted):
                    yield Change((name, label) if label else (name,), MISSING, layer)


def _bound_packages(module: types.ModuleType) -> Iterator[str]:
    """Packages whose modules a file binds, however it got them: `from .utils import tilelang`."""
    for value in vars(module).values():
        if type(value) is types.ModuleType:
            yield value.__name__.partition(".")[0]


def _trusted_folders(packages: set[str]) -> list[str]:
    """The folders of the packages that a file imports, and of torch, which wraps compiled code."""
    found = []
    for name in {*packages, "torch"}:
        module = sys.modules.get(name)
        found += list(getattr(module, "__path__", None) or [getattr(module, "__file__", None)])
    return [os.path.realpath(folder) for folder in found if isinstance(folder, str)]


def _comes_from(thing: Any, codes: dict[int, types.CodeType], trusted: list[str]) -> bool:
    if type(thing) is types.FunctionType:
        if id(thing.__code__) in codes:
            return True
        if not thing.__code__.co_filename.startswith("<"):
            return _lies_in(thing.__code__.co_filename, trusted)
        home = sys.modules.get(str(thing.__globals__.get("__name__")))
        if home is None or vars(home) is not thing.__globals__:
            return True  # generated, such as the methods of a named tuple
    else:
        home = sys.modules.get(type(thing).__module__)
    if home is None:
        return True  # a type of an extension, whose module has another name
    file = getattr(home, "__file__", None)
    builtin = home.__name__ in sys.builtin_module_names
    return builtin or (isinstance(file, str) and _lies_in(file, trusted))


def _lies_in(file: str, folders: list[str]) -> bool:
    file = os.path.realpath(file)
    if any(file == folder or file.startswith(folder + os.sep) for folder in folders):
        return True
    library = os.path.realpath(sysconfig.get_path("stdlib")) + os.sep
    return file.startswith(library) and "-packages" + os.sep not in file.removeprefix(library)
