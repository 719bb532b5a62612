"""The megatron that this process has imported, compared with the receipt."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

from cppmega.errors import CppmegaError
from cppmega.guard import live_code, swaps
from cppmega.guard.checked_module import WatchedFile, file_changed
from cppmega.guard.copied_names import PACKAGES
from cppmega.overlay.receipt import PatchedFile, Receipt
from cppmega.page import Edit
from cppmega.tree.installed import part_of, sha256


def only_from(root: Path) -> None:
    """Make `megatron` in this process exactly `root/megatron`, whatever else is on the path.

    megatron has no `__init__.py`: Python would otherwise merge every folder of that name.
    """
    for package in PACKAGES:
        folder = root / package
        if folder.is_dir() and not (folder / "__init__.py").exists():
            module = types.ModuleType(package)
            module.__path__ = [str(folder)]
            # As for any namespace, so that importlib finds the package here too.
            module.__spec__ = ModuleSpec(package, None, is_package=True)
            module.__spec__.submodule_search_locations = module.__path__
            sys.modules[package] = module
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))


def watch(root: Path, receipt: Receipt, edits: Mapping[str, Sequence[Edit]]) -> None:
    """Record the imports of patched files from now on; call it before megatron is imported."""
    files = {
        path: WatchedFile(path, entry.after, _pages(entry)) for path, entry in receipt.files.items()
    }
    for page in receipt.pages:
        for edit in edits.get(page, ()):
            if edit.path not in files and (root / edit.path).is_file():  # patched at run time only
                digest = sha256((root / edit.path).read_bytes())
                files[edit.path] = WatchedFile(edit.path, digest, page)
    live_code.watch(root, files)
    swaps.on_replacement(live_code.expect)


def check(root: Path, receipt: Receipt) -> None:
    """Compare the files, the runtime patches and the code in memory with what was applied.

    Raises:
        CppmegaError: what `check_files` and `check_memory` raise.
    """
    check_files(root, receipt)
    check_memory(root)


def check_files(root: Path, receipt: Receipt) -> None:
    """Compare the patched files that were imported with what was applied.

    Raises:
        CppmegaError: `file-changed`.
    """
    for path, entry in receipt.files.items():
        if swaps.module_name(path) in sys.modules and _digest(root / path) != entry.after:
            raise file_changed(str(root / path), _pages(entry))


def check_memory(root: Path) -> None:
    """Compare the runtime patches and the code in memory with what was imported.

    Raises:
        CppmegaError: `shadowed`, `file-changed` of an import, `not-watched`, `stale-code`, and
            what `swaps.check` raises.
    """
    _refuse_shadows(root)
    swaps.check()
    live_code.check()


def _pages(entry: PatchedFile) -> str:
    return ", ".join(step.partition("@")[0] for step in entry.steps)


_DIGESTS: dict[Path, tuple[tuple[int, ...], str]] = {}
"""Path -> the answer of `stat`, and the hash of the content at that time."""


def _digest(path: Path) -> str:
    """SHA-256 of a file, which is read again only if `stat` shows that it may have changed."""
    try:
        there = path.stat()
    except OSError:
        return ""
    state = (there.st_ino, there.st_size, there.st_mtime_ns, there.st_ctime_ns)
    if _DIGESTS.get(path, ((), ""))[0] != state:
        _DIGESTS[path] = (state, sha256(path.read_bytes()))
    return _DIGESTS[path][1]


def _refuse_shadows(root: Path) -> None:
    """Refuse modules that ROOT has and that came from elsewhere.

    Other distributions share the name `megatron`, so modules that ROOT lacks may come from them.
    """
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.partition(".")[0] != "megatron" or not isinstance(file, str):
            continue
        part = root / part_of(name.replace(".", "/"))
        if not part.exists() and not part.with_suffix(".py").exists():
            continue
        if not Path(file).is_relative_to(root) and not Path(file).resolve().is_relative_to(
            root.resolve()
        ):
            raise shadowed(name, file, root)


def shadowed(name: str, file: str, root: Path) -> CppmegaError:
    """The error for a module that did not come from the tree, although the tree has it."""
    return CppmegaError(
        "shadowed",
        f"{name} was imported from {file}, not from {root}.",
        "The patched tree is not the one that trains.",
        "remove the other folder from PYTHONPATH",
    )
