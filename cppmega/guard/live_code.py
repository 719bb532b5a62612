"""The patched code in memory: check that what a patched module's import produced still runs.

`watch` is called before megatron is imported. From then on a patched file is compiled from bytes
that match the receipt, never from bytecode, and everything its import leaves behind is recorded.
`check` compares the process with the records: the modules, the copies of their names in other
modules, and modules that hold the same file under another name.

What this does not detect is listed in `cppmega.guard`.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any

from cppmega.errors import CppmegaError
from cppmega.guard import allowed, import_hook
from cppmega.guard.checked_module import CheckedLoader, CheckedModule, WatchedFile, repin
from cppmega.guard.compiled_forms import is_compiled
from cppmega.guard.copied_names import Names, wrong_copies
from cppmega.guard.pinned import MISSING, Change


@dataclass
class _Watched:
    """The patched files of this process and their imports."""

    hooked: bool = False
    files: dict[str, WatchedFile] = field(default_factory=dict)
    """By the real path of each patched file."""
    basenames: set[str] = field(default_factory=set)
    modules: list[CheckedModule] = field(default_factory=list)
    """Every execution of a patched file in this process, including modules since dropped."""
    problems: list[CppmegaError] = field(default_factory=list)
    """The errors of imports, even if they were caught."""
    names: Names = field(default_factory=Names)


_WATCHED = _Watched()
_TRUSTED_LOADERS = (SourceFileLoader.__module__, "cppmega")
"""Modules whose loaders compile the text of the file."""


def watch(root: Path, files: Mapping[str, WatchedFile]) -> None:
    """Record every patched file that is imported from now on.

    Args:
        root: the tree.
        files: the patched files, by their path below `root`.
    """
    if not _WATCHED.hooked:
        _WATCHED.hooked = True
        import_hook.add(import_hook.Hook(wants=_is_patched, found=_exchange_loader))
    _WATCHED.files = {os.path.realpath(root / path): file for path, file in files.items()}
    _WATCHED.basenames = {path.rpartition("/")[2] for path in files}
    _WATCHED.problems.clear()


def replace(owner: Any, name: str, new: Any) -> None:
    """Assign a name of a patched module or class on behalf of the overlay; the check expects it."""
    setattr(owner, name, new)
    expect(owner, name)


def expect(owner: Any, name: str) -> None:
    """Make the check expect, from now on, the current value of a name."""
    for checked in _WATCHED.modules:
        repin(checked, owner, name)
    _WATCHED.names.learn(vars(owner)[name])


def check() -> None:
    """Compare the whole process with what the imports produced.

    Raises:
        CppmegaError: `file-changed`, `not-watched`, `stale-code`.
    """
    for problem in _WATCHED.problems:
        raise problem
    for error in _unwatched():
        raise error
    found = [_error(*wrong) for wrong in _wrong()]
    if found:
        more = f" ({len(found) - 1} more of this kind.)" if len(found) > 1 else ""
        first = found[0]
        raise CppmegaError(first.name, first.what + more, first.why, first.next)


def _is_patched(spec: ModuleSpec) -> bool:
    return _holds_patched(spec.origin)


def _holds_patched(file: Any) -> bool:
    if not isinstance(file, str) or file.rpartition("/")[2] not in _WATCHED.basenames:
        return False
    return os.path.realpath(file) in _WATCHED.files


def _exchange_loader(spec: ModuleSpec) -> None:
    home = type(spec.loader).__module__.partition(".")[0]
    if not isinstance(spec.loader, SourceFileLoader) or home not in _TRUSTED_LOADERS:
        return  # it may compile different code: `check` refuses the module
    file = _WATCHED.files[os.path.realpath(spec.loader.path)]
    spec.loader = CheckedLoader(
        spec.loader.name, spec.loader.path, file, _executed, _WATCHED.problems.append
    )


def _executed(checked: CheckedModule) -> None:
    for earlier in _WATCHED.modules:
        if earlier.module is checked.module:
            earlier.bound = False  # reloaded
    _WATCHED.modules.append(checked)
    for name in checked.facts.defined & checked.pins.keys():
        _WATCHED.names.add(checked.name, name, checked.pins[name])


def _unwatched() -> Iterator[CppmegaError]:
    """Errors for modules that hold a patched file and were not recorded."""
    known = {id(checked.module) for checked in _WATCHED.modules}
    names = {checked.name for checked in _WATCHED.modules}
    for name, module in list(sys.modules.items()):
        if id(module) in known:
            continue
        file = getattr(module, "__dict__", {}).get("__file__")
        if _holds_patched(file) or name in names:
            yield _not_watched(name, module, file)
    for name in names:
        package, _, leaf = name.rpartition(".")
        held = getattr(sys.modules.get(package), "__dict__", {}).get(leaf)
        if isinstance(held, types.ModuleType) and id(held) not in known:
            yield _not_watched(f"{name}, as an attribute of {package}", held, None)


def _not_watched(name: str, module: Any, file: Any) -> CppmegaError:
    loader = type(getattr(module, "__loader__", None)).__qualname__
    return CppmegaError(
        "not-watched",
        f"Module {name} ({file or 'without a file'}, loaded by {loader}) holds a patched file or "
        "its name, and the guard has not seen its import.",
        "Its code was not compared with anything, and runtime patches are not in it.",
        "start with `python -m cppmega.run`, import nothing of megatron first, and import its "
        "modules only with `import`",
    )


def _wrong() -> Iterator[tuple[str, Change]]:
    """Everything that has changed and is not vouched for: the place, and the difference."""
    for checked in _WATCHED.modules:
        for change in checked.changes():
            if not _is_accepted(change):
                yield f"{checked.file.path}:{_symbol(change)}", change
    for module, name, then, now in wrong_copies(_WATCHED.names):
        change = Change((name,), then, now)
        if not _is_accepted(change):
            yield f"the copy {name} in module {module}", change


def _is_accepted(change: Change) -> bool:
    then, now = change.then, change.now
    if now is MISSING or isinstance(now, types.CodeType):
        return False  # a name that is gone, or a code object replaced inside its function
    if then is not MISSING and is_compiled(_function(now), _function(then)):
        _WATCHED.names.learn(now)
        return True
    return allowed.is_allowed(now, _symbol(change))


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
    return CppmegaError(
        "stale-code",
        f"{where} {what}. It is not what a clean import of its file gives.",
        "The patch is on disk, but different code runs.",
        f"find the code that assigns that name{allow}",
    )
