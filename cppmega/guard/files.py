"""The files of Megatron that this process has imported: each has an origin, and is still there.

A file is vouched for by the RECORD of the distribution that installed it, by the commit of a
checkout, by the receipt if it is patched, or by an edit that was accepted by name and hash. Only
imported files are read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from cppmega.errors import CppmegaError
from cppmega.guard import expected, imports, swaps
from cppmega.guard.imports import PACKAGES
from cppmega.guard.modules import in_memory
from cppmega.host.wording import listed
from cppmega.overlay.receipt import Receipt
from cppmega.page import Edit
from cppmega.tree import accepted
from cppmega.tree.installed import Tree, part_of, sha256

_PATCHED = "patched"
_BUILT = "built here"
ACCEPTED = "accepted"


def only_from(root: Path) -> None:
    """Make `megatron` in this process exactly `root/megatron`, whatever else is on the path.

    megatron has no `__init__.py`: Python would otherwise merge every folder of that name.
    """
    for package in PACKAGES:
        folder = root / package
        if folder.is_dir() and not (folder / "__init__.py").exists():
            module = ModuleType(package)
            module.__path__ = [str(folder)]
            # As for any namespace, so that importlib finds the package here too.
            module.__spec__ = ModuleSpec(package, None, is_package=True)
            module.__spec__.submodule_search_locations = module.__path__
            sys.modules[package] = module
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))


def watch(root: Path, receipt: Receipt, edits: Mapping[str, Sequence[Edit]]) -> None:
    """Record imports from now on; call it before megatron is imported."""
    runtime = {edit.path for page in receipt.pages for edit in edits.get(page, ())}
    own = {name for file in receipt.files.values() for name in file.runs}
    armed = (page for page in receipt.pages.values() if page.state == "armed")
    own |= {name for page in armed for name in page.reached}
    imports.watch((root / path for path in {*receipt.files, *runtime}), own)
    swaps.on_replacement(imports.expect)


@dataclass
class Judged:
    """The imported files, their origins, and the problems with them."""

    files: dict[str, str] = field(default_factory=dict)
    """Path -> SHA-256 of every imported file."""
    owners: dict[str, str] = field(default_factory=dict)
    """Path -> what vouches for it; a path without an owner is unverified."""
    problems: list[CppmegaError] = field(default_factory=list)
    replaced: list[CppmegaError] = field(default_factory=list)
    """Those problems of files that were vouched for when they were imported: disk, not memory."""

    def take_ours(self) -> None:
        """Compare the files of this package with those that were imported."""
        for one in imports.ours():
            file, name = Path(one.path), one.module.__name__
            now = sha256(file.read_bytes()) if file.is_file() else ""
            self.take(name, "cppmega", one.code.digest)
            if now != one.code.digest:
                self.problems.append(_changed(one.path, "It has changed since it was imported."))
                self.replaced.append(self.problems[-1])

    def take(self, path: str, owner: str, digest: str) -> None:
        """Note a file, and what vouches for it."""
        self.files[path] = digest
        if owner:
            self.owners[path] = owner

    @property
    def edits(self) -> dict[str, str]:
        """The accepted edits that were imported: path -> SHA-256."""
        return {p: self.files[p] for p, owner in self.owners.items() if owner == ACCEPTED}

    @property
    def unverified(self) -> list[str]:
        """Files that no RECORD and no commit vouches for."""
        return sorted(self.files.keys() - self.owners.keys())

    @property
    def digest(self) -> str:
        """One hash over all files, by which ranks are compared."""
        return sha256("\n".join(f"{p} {self.files[p]}" for p in sorted(self.files)).encode())[:16]

    def summary(self) -> str:
        """One line for a log."""
        counts: dict[str, int] = {}
        for owner in self.owners.values():
            counts[owner] = counts.get(owner, 0) + 1
        text = ", ".join(f"{n} of {owner}" for owner, n in sorted(counts.items())) or "no file"
        if self.edits:
            text += f"; accepted edits: {listed(sorted(self.edits), 3)}"
        if self.unverified:
            text += f"; {len(self.unverified)} unverified, of no RECORD and no commit: "
            text += listed(self.unverified, 3)
        return text


_LAST = Judged()


class _Sound(NamedTuple):
    """A file that some check has vouched for, so that it is not read again."""

    spec: object
    """That of its import: a later one is new code."""
    on_disk: object
    """Its identity, and what the receipt and the accepted edits say of it."""
    owner: str
    digest: str


_SOUND: dict[str, _Sound] = {}


def _identity(file: str) -> tuple[int, ...]:
    """What changes with the content of a file, so that it need not be read again."""
    try:
        there = Path(file).stat()
    except OSError:
        return ()
    return there.st_dev, there.st_ino, there.st_size, there.st_mtime_ns, there.st_ctime_ns


def look(root: Path, receipt: Receipt) -> Judged:
    """Judge what this process has imported so far."""
    global _LAST
    try:
        _LAST = judge(root, receipt, accepted.in_this_process())
    except (CppmegaError, OSError) as error:  # of a tree that is being replaced
        unread = _changed(str(root), f"It cannot be read: {error}.")
        _LAST = Judged(problems=[unread], replaced=[unread])
    return _LAST


def last() -> Judged:
    """The result of the last `look`."""
    return _LAST


def judge(root: Path, receipt: Receipt, edits: accepted.Edits) -> Judged:
    """Judge every imported module of the packages that the receipt names."""
    judging = _Judge(root, receipt, edits)
    for name, module in imports.in_question():
        judging.take(name, module)
    judging.judged.take_ours()
    expected.remember()
    return judging.judged


class _Judge:
    def __init__(self, root: Path, receipt: Receipt, edits: accepted.Edits) -> None:
        self.judged = Judged()
        self._receipt, self._accepted = receipt, edits
        targets = (target for page in receipt.pages.values() for target in page.targets)
        self._packages = {"megatron", *(target.partition("/")[0] for target in targets)}
        self._root = root.resolve()
        self._tops = tuple(f"{top}/" for top in dict.fromkeys((root.absolute(), self._root)))
        self._trees = {self._root: Tree(root)}
        self._sites: dict[str, Path] = {}

    def take(self, name: str, module: object) -> None:
        """Judge one module, if it is of these packages by its name or by its file."""
        if not isinstance(module, ModuleType):
            if module is not None and name.partition(".")[0] in self._packages:
                self.judged.problems.append(in_memory(name))
            return
        spec = vars(module).get("__spec__")  # an attribute of a lazy module may trigger imports
        file = spec.origin if spec is not None and spec.has_location else None
        file = file or vars(module).get("__file__")
        if spec is None and file is not None and _is_of_extension(name, module, file):
            return
        if name.partition(".")[0] in self._packages:
            if spec is None or spec.name == name or sys.modules.get(spec.name) is not module:
                self.judged.problems += self._named(name, module, file)  # else: an alias
        elif isinstance(file, str) and file.startswith(self._tops):  # by its path, or as a script
            top = next(top for top in self._tops if file.startswith(top))
            if file.removeprefix(top).partition("/")[0] in self._packages:
                path = file.removeprefix(top)
                self.judged.problems += self._file(module, self._root, path, file)

    def _named(self, name: str, module: ModuleType, file: str | None) -> Iterator[CppmegaError]:
        base = name.replace(".", "/")
        if file is None:
            yield from self._without_a_file(name, module, base)
            return
        path = next((p for p in _paths(base) if file.endswith(f"/{p}")), None)
        if path is None:
            yield _other_file(name, file, f"{self._root / base}.py")
            return
        site = self._site(file.removesuffix(f"/{path}"))
        if site != self._root and _exists(self._root, part_of(path)):
            yield shadowed(name, file, self._root)
            return
        hidden = site / f"{base}.py"
        if path != f"{base}.py" and hidden.exists():
            yield _other_file(name, file, str(hidden))
            return
        yield from self._file(module, site, path, file)

    def _site(self, folder: str) -> Path:
        if folder not in self._sites:
            self._sites[folder] = Path(folder).resolve()
        return self._sites[folder]

    def _without_a_file(self, name: str, module: ModuleType, base: str) -> Iterator[CppmegaError]:
        """Judge a namespace by its folders; other modules without a file were created in memory."""
        places = getattr(module, "__path__", None)
        if places is None:
            yield in_memory(name)
            return
        for place in places:
            # What does not exist is the placeholder of an editable install's finder; each module
            # that the finder knows has a file.
            if not str(place).endswith(f"/{base}") and Path(place).exists():
                yield _other_file(name, str(place), str(self._root / base))

    def _file(self, module: ModuleType, site: Path, path: str, file: str) -> list[CppmegaError]:
        """Judge the file that a module came from, as it was when it was imported, or is now."""
        spec = getattr(module, "__spec__", None)
        now = _identity(file), self._receipt.files.get(path), self._accepted.get(path)
        known = _SOUND.get(file)
        if known is not None and (known.spec, known.on_disk) == (spec, now):
            self.judged.take(path, known.owner, known.digest)
            return []
        problems = [*self._problems(module, site, path, file)]
        if not problems and path in self.judged.owners:
            owner, digest = self.judged.owners[path], self.judged.files[path]
            _SOUND[file] = _Sound(spec, now, owner, digest)
        elif problems and known is not None and known.spec is spec:
            self.judged.replaced += problems
        return problems

    def _problems(
        self, module: ModuleType, site: Path, path: str, file: str
    ) -> Iterator[CppmegaError]:
        """What is wrong with the file that a module came from.

        Args:
            module: the module.
            site: the folder that holds the package.
            path: the path of the file in that folder.
            file: the path of the file as Python has it.
        """
        tree = self._trees.setdefault(site, Tree(site))
        data, imported = tree.read(path), imports.recorded(module)
        if data is None or (imported is not None and sha256(data) != imported.code.digest):
            carries = self._carries(path)
            yield _changed(file, f"It has changed since this process imported it.{carries}")
            return
        now, mine = sha256(data), self._receipt.files.get(path)
        if mine is not None and tree.root.resolve() == self._root:
            self.judged.take(path, _PATCHED, now)
            if mine.after != now:
                yield _changed(file, f"It is not what was applied.{self._carries(path)}")
            return
        owner, problem = origin(tree, path, data, self._accepted)
        self.judged.take(path, owner, now)
        if problem is not None:
            yield problem

    def _carries(self, path: str) -> str:
        patched = self._receipt.files.get(path)
        if patched is None:
            return ""
        pages = ", ".join(step.partition("@")[0] for step in patched.steps)
        return f" It carries {pages}."


def origin(
    tree: Tree, path: str, data: bytes, edits: accepted.Edits
) -> tuple[str, CppmegaError | None]:
    """What vouches for a file without patches, or the error; neither where nothing can tell."""
    now = sha256(data)
    if tree.vouched(path):
        listed = tree.listed(path)
        commit = tree.checkout.commit[:12] if tree.checkout is not None else "?"
        return listed[0] if listed is not None else f"commit {commit}", None
    if path in edits:
        return ACCEPTED, None if edits[path] == now else _accepted_other(path, now, edits[path])
    if path.endswith(tuple(EXTENSION_SUFFIXES)) and _is_built(tree, path):
        return _BUILT, None
    if tree.pristine(path)[0] != "unverified":
        return "", foreign_edit(tree, path, now)
    return "", _foreign_file(tree, path, now) if tree.has_origin(path) else None


def _accepted_other(path: str, now: str, wanted: str) -> CppmegaError:
    return CppmegaError(
        "accepted-edit-differs",
        f"{path} was accepted with SHA-256 {wanted}, and has {now}.",
        "It was edited again after it had been inspected and accepted.",
        f"inspect it, then pass --accept {path}={now}",
    )


def foreign_edit(tree: Tree, path: str, now: str, edit: str = "") -> CppmegaError:
    """The error for a file whose text differs from upstream's."""
    return CppmegaError(
        "foreign-edit",
        f"{path} differs from upstream's" + (f"; {edit}" if edit else "."),
        "The run would train an edit that no receipt, log or checkpoint names.",
        f"{tree.restore(path)}; or make the edit a page: cppmega new NAME; or accept "
        f"it: --accept {path}={now}",
    )


def _foreign_file(tree: Tree, path: str, now: str) -> CppmegaError:
    return CppmegaError(
        "foreign-file",
        f"{tree.root / path} is not upstream's: no RECORD and no commit names it.",
        "The run would train added code that no receipt, log or checkpoint names.",
        f"move it away; or accept it: --accept {path}={now}",
    )


def _is_of_extension(name: str, module: ModuleType, file: str) -> bool:
    """Whether the code of an extension created this module inside its own, which is judged.

    pybind11 gives such a submodule the file of the extension, and neither a spec nor a loader.
    """
    outer, _, attribute = name.rpartition(".")
    extension = sys.modules.get(outer)
    spec = getattr(extension, "__spec__", None)
    return (
        type(getattr(spec, "loader", None)) is ExtensionFileLoader
        and getattr(spec, "origin", None) == file
        and vars(extension).get(attribute) is module
    )


def _paths(base: str) -> Iterator[str]:
    """The places where the import system looks for a module, relative to its site."""
    yield f"{base}.py"
    yield f"{base}/__init__.py"
    for suffix in EXTENSION_SUFFIXES:
        yield f"{base}{suffix}"
        yield f"{base}/__init__{suffix}"


def _exists(root: Path, part: str) -> bool:
    return (root / part).is_dir() or (root / f"{part}.py").is_file()


def _is_built(tree: Tree, path: str) -> bool:
    """Whether Megatron compiles an extension where it is installed; all ranks' must be the same.

    A wheel may also contain one, which a user's make then replaces.
    """
    return (tree.root / path).with_name("Makefile").is_file()


def shadowed(name: str, file: str, root: Path) -> CppmegaError:
    """The error for a module that did not come from the tree, although the tree has it."""
    return CppmegaError(
        "shadowed",
        f"{name} was imported from {file}, not from {root}.",
        "The patched tree is not the one that trains.",
        "remove the other folder from PYTHONPATH",
    )


def _other_file(name: str, file: str, wanted: str) -> CppmegaError:
    return CppmegaError(
        "other-file",
        f"{name} was imported from {file}, not from {wanted}.",
        "The file that was checked exists, but its code is not what trains.",
        f"move {file} away",
    )


def _changed(file: str, what: str) -> CppmegaError:
    return CppmegaError(
        "file-changed",
        f"{file} is not what was checked. {what}",
        "The code that trains is not the code on disk.",
        "cppmega status",
    )
