"""The patched code in memory: what every patched module's import gave is still what runs.

`watch` is called before megatron is imported. From then on a patched file is compiled from bytes
that match the receipt, never from bytecode, and everything its import leaves behind is recorded.
`check` compares the process with the records: the modules, the copies of their names in other
modules, and modules that hold the same file under another name.

What this cannot see is listed in `cppmega.guard`.
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
from cppmega.live import import_hook, vouched
from cppmega.live.checked_module import CheckedLoader, CheckedModule, WatchedFile, repin
from cppmega.live.compiled import is_compiled
from cppmega.live.copied_names import Names, wrong_copies
from cppmega.live.pinned import MISSING, Change


@dataclass
class _State:
    hooked: bool = False
    files: dict[str, WatchedFile] = field(default_factory=dict)
    """Real path of each patched file."""
    basenames: set[str] = field(default_factory=set)
    modules: list[CheckedModule] = field(default_factory=list)
    """Every execution of a patched file in this process, also of modules since dropped."""
    problems: list[CppmegaError] = field(default_factory=list)
    """What an import raised, whoever caught it."""
    names: Names = field(default_factory=Names)


_STATE = _State()
_PYTHONS_OWN = (SourceFileLoader.__module__, "cppmega")
"""Where loaders are defined that compile what the file holds."""


def watch(root: Path, files: Mapping[str, WatchedFile]) -> None:
    """Record every patched file that is imported from now on.

    Args:
        files: path below `root` -> what the file must hold.
    """
    if not _STATE.hooked:
        _STATE.hooked = True
        import_hook.add(import_hook.Hook(wants=_is_patched, found=_exchange_loader))
    _STATE.files = {os.path.realpath(root / path): file for path, file in files.items()}
    _STATE.basenames = {path.rpartition("/")[2] for path in files}
    _STATE.problems.clear()


def replace(owner: Any, name: str, new: Any) -> None:
    """Assign a name of a patched module or class for the overlay itself: the check expects it."""
    setattr(owner, name, new)
    expect(owner, name)


def expect(owner: Any, name: str) -> None:
    """From now on the check expects what a name means at this moment."""
    for made in _STATE.modules:
        repin(made, owner, name)
    _STATE.names.learn(vars(owner)[name])


def check() -> None:
    """Compare the whole process with what the imports gave.

    Raises:
        CppmegaError: `file-changed`, `not-watched`, `stale-code`.
    """
    for problem in _STATE.problems:
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
    if not isinstance(file, str) or file.rpartition("/")[2] not in _STATE.basenames:
        return False
    return os.path.realpath(file) in _STATE.files


def _exchange_loader(spec: ModuleSpec) -> None:
    home = type(spec.loader).__module__.partition(".")[0]
    if not isinstance(spec.loader, SourceFileLoader) or home not in _PYTHONS_OWN:
        return  # it may make other code of the file: `check` refuses the module
    file = _STATE.files[os.path.realpath(spec.loader.path)]
    spec.loader = CheckedLoader(
        spec.loader.name, spec.loader.path, file, _executed, _STATE.problems.append
    )


def _executed(made: CheckedModule) -> None:
    for earlier in _STATE.modules:
        if earlier.module is made.module:
            earlier.bound = False  # reloaded
    _STATE.modules.append(made)
    for name in made.facts.defined & made.pins.keys():
        _STATE.names.add(made.name, name, made.pins[name])


def _unwatched() -> Iterator[CppmegaError]:
    """Modules that hold a patched file and were not recorded."""
    known = {id(made.module) for made in _STATE.modules}
    names = {made.name for made in _STATE.modules}
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
        "its name, and was not imported under the guard's eyes.",
        "What it runs was compared with nothing, and runtime patches are not in it.",
        "start with `python -m cppmega.run`, import nothing of megatron first, and import its "
        "modules only with `import`",
    )


def _wrong() -> Iterator[tuple[str, Change]]:
    """Everything that is neither what it was nor vouched for: where, and the difference."""
    for made in _STATE.modules:
        for change in made.changes():
            if not _is_accepted(change):
                yield f"{made.file.path}:{_symbol(change)}", change
    for module, name, then, now in wrong_copies(_STATE.names):
        change = Change((name,), then, now)
        if not _is_accepted(change):
            yield f"the copy {name} in module {module}", change


def _is_accepted(change: Change) -> bool:
    then, now = change.then, change.now
    if now is MISSING or isinstance(now, types.CodeType):
        return False  # a name that is gone, or a code object exchanged inside its function
    if then is not MISSING and is_compiled(_function(now), _function(then)):
        _STATE.names.learn(now)
        return True
    return vouched.is_allowed(now, _symbol(change))


def _function(thing: Any) -> Any:
    return thing.__func__ if isinstance(thing, staticmethod | classmethod) else thing


def _symbol(change: Change) -> str:
    """The name that a change is of, without the inner parts of the object."""
    return ".".join(part for part in change.path if part.isidentifier())


def _error(where: str, change: Change) -> CppmegaError:
    key, part = vouched.key(change.now), change.path[-1]
    if change.now is MISSING:
        what = "is gone"
    elif part.isidentifier():
        what = f"is {vouched.describe(change.now)}"
    else:
        what = f"was changed in place: its {part.strip('()')} is {vouched.describe(change.now)}"
    allow = f"; if it is meant: python -m cppmega.run --allow-wrapper {key} ..." if key else ""
    return CppmegaError(
        "stale-code",
        f"{where} {what}. It is not what a clean import of its file gives.",
        "The patch is on disk, but not what runs.",
        f"look for whoever assigns that name{allow}",
    )
