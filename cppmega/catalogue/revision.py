"""Hash all the code that a page, or the engine, reaches.

Imports are followed through the complete package, including relative ones and those inside
functions, and files that a page reads count as well. Comments and docstrings do not count, unless
reached code reads them.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cppmega.host.paths import PACKAGE as PACKAGE_FOLDER
from cppmega.page import Edit
from cppmega.rewriting.code_text import LENGTH, PACKAGE, Code, code_of

_ENTRANCES = (f"{PACKAGE}.rewriting.rewrite", f"{PACKAGE}.overlay.survey")
"""The engine's entry points: one produces the text of a file, one answers questions about it."""

_RULES = f"{PACKAGE}.rules"
"""Rules decide which runs may start. They change nothing that is written or that trains."""

Hashes = dict[str, str]
"""Module -> hash of its code."""


@dataclass(frozen=True, slots=True)
class Revision:
    """The hashes of a page."""

    code: str
    """One hash of its code and of everything that it reaches outside the engine."""
    text: str
    """One hash of its own files as they are, comments included, since those inside functions are
    written into Megatron's files."""
    reached: Hashes
    """The modules of this package that it reaches, without the engine's."""


@dataclass(frozen=True, slots=True)
class _Module:
    """One module of this package."""

    code: Code
    text: str
    """Hash of the file as it is."""
    imports: tuple[str, ...]
    data: tuple[Path, ...]
    """Files in its folder that it reads."""

    def hash(self, whole: bool) -> str:
        """Hash its code, or its complete text, together with the files that it reads."""
        mine = self.text if whole else self.code.bare
        read = {file.name: _raw(file.read_bytes()) for file in self.data}
        return _joined({"": mine, **read}) if read else mine


@functools.cache
def engine_revision() -> str:
    """Hash of the modules that decide what a patched file looks like."""
    return _joined(reached(_ENTRANCES))


def of_page(path: Path, edits: Iterable[Edit]) -> Revision:
    """Hash a page: its files, its helpers' files, and what they import and read."""
    own = _own_files(path, edits)
    codes = [code_of(data) for file, data in own if file.suffix == ".py"]
    covered = _closure(_ENTRANCES)
    modules = _closure(tuple(sorted({name for code in codes for name in code.imports})))
    modules = {name: module for name, module in modules.items() if name not in covered}
    whole = _reads_text([*codes, *(module.code for module in modules.values())])
    hashes = {name: module.hash(whole) for name, module in modules.items()}
    rows, raw = {}, {}
    for at, (file, data) in enumerate(own):
        raw[f"{at} {file.name}"] = _raw(data)
        bare = file.suffix == ".py" and not whole
        rows[f"{at} {file.name}"] = code_of(data).bare if bare else _raw(data)
    return Revision(_joined(rows | hashes)[:12], _joined(raw)[:12], hashes)


def reached(names: Iterable[str]) -> Hashes:
    """The modules of this package that importing these ones may run, with their hashes."""
    modules = _closure(tuple(names))
    whole = _reads_text(module.code for module in modules.values())
    return {name: module.hash(whole) for name, module in modules.items()}


def changed(then: Mapping[str, str]) -> list[str]:
    """Names of the modules whose code is no longer what it was when these hashes were recorded."""
    now = reached(then)
    return [name for name in sorted(then) if now.get(name) != then[name]]


def _reads_text(codes: Iterable[Code]) -> bool:
    return any(code.reads_text for code in codes)


@functools.cache
def _closure(names: tuple[str, ...]) -> dict[str, _Module]:
    """These modules and everything that they import, by name in alphabetical order."""
    modules: dict[str, _Module] = {}
    pending = list(names)
    while pending:
        name = pending.pop()
        module = _module(name) if name not in modules and not name.startswith(_RULES) else None
        if module is not None:
            modules[name] = module
            pending += module.imports
    return dict(sorted(modules.items()))


@functools.cache
def _module(name: str) -> _Module | None:
    """A module of this package; None for any other name. Read once: a process runs one version."""
    if not name.startswith(f"{PACKAGE}."):
        return None
    below = PACKAGE_FOLDER.joinpath(*name.split(".")[1:])
    for file in (below / "__init__.py", below.with_name(f"{below.name}.py")):
        if file.is_file():
            data = file.read_bytes()
            code = code_of(data)
            package = name if file.stem == "__init__" else name.rpartition(".")[0]
            imports = {*_parents(name), *_absolute(code.imports, package)}
            return _Module(
                code, _raw(data), tuple(sorted(imports)), tuple(_files_read_by(file, code))
            )
    return None


def _parents(name: str) -> Iterator[str]:
    """Packages whose `__init__` an import runs too; the outermost does nothing by itself."""
    parts = name.split(".")
    yield from (".".join(parts[:count]) for count in range(2, len(parts)))


def _absolute(names: Iterable[str], package: str) -> Iterator[str]:
    """Make the names of imports absolute, as seen from a package."""
    parts = package.split(".")
    for name in names:
        plain = name.lstrip(".")
        above = parts[: len(parts) + 1 - (len(name) - len(plain))]
        yield name if plain == name else ".".join([*above, plain]).rstrip(".")


def _own_files(path: Path, edits: Iterable[Edit]) -> list[tuple[Path, bytes]]:
    """Read the page's file or folder, its helpers' files, their relative imports, and the files
    that they name."""
    files = {path}
    if path.stem == "__init__":
        inside = (file for file in path.parent.rglob("*") if file.is_file())
        files |= {file for file in inside if "__pycache__" not in file.parts}
    for edit in edits:
        for helper in edit.helpers:
            module = sys.modules.get(getattr(helper, "__module__", ""))
            files |= {Path(file) for file in [getattr(module, "__file__", None)] if file}
    read: dict[Path, bytes] = {}
    while pending := files - read.keys():
        for file in pending:
            read[file] = file.read_bytes()
            if file.suffix == ".py":
                code = code_of(read[file])
                files |= {*_relative(file, code), *_files_read_by(file, code)}
    return sorted(read.items(), key=lambda f: (f[0].name, f[1]))


def _relative(file: Path, code: Code) -> Iterator[Path]:
    """Find the files that a page imports relatively, with the `__init__` of their packages."""
    for name in filter(lambda name: name.startswith("."), code.imports):
        parts = name.lstrip(".").split(".")
        folder = file.parents[len(name) - len(name.lstrip(".")) - 1]
        for count in range(1, len(parts) + 1):
            below = folder.joinpath(*parts[:count])
            for module in (below / "__init__.py", below.with_name(f"{below.name}.py")):
                if module.is_file():
                    yield module


def _files_read_by(file: Path, code: Code) -> Iterator[Path]:
    """Find the files that a file's code reads by name from its own folder."""
    yield from (file.parent / name for name in code.beside if (file.parent / name).is_file())


def _raw(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:LENGTH]


def _joined(hashes: Mapping[str, str]) -> str:
    rows = "\n".join(f"{name} {value}" for name, value in hashes.items())
    return _raw(rows.encode())
