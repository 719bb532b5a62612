"""The megatron that this process has imported, against the receipt: files, hashes, code objects."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cppmega.errors import CppmegaError
from cppmega.page import Edit
from cppmega.receipt import Receipt
from cppmega.runtime import module_name
from cppmega.source import plain
from cppmega.tree import part_of, sha256

PACKAGES = ("megatron", "mamba_ssm", "liger_kernel", "transformer_engine")


def only_from(root: Path) -> None:
    """Make `megatron` in this process exactly `root/megatron`, whatever else is on the path.

    megatron has no `__init__.py`: Python would otherwise merge every folder of that name.
    """
    for package in PACKAGES:
        folder = root / package
        if folder.is_dir() and not (folder / "__init__.py").exists():
            module = types.ModuleType(package)
            module.__path__ = [str(folder)]
            sys.modules[package] = module
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))


def check(root: Path, receipt: Receipt, edits: Mapping[str, Sequence[Edit]]) -> None:
    """Compare the imported modules with what was applied.

    Raises:
        CppmegaError: `shadowed`, `file-changed`, `stale-code`.
    """
    _refuse_shadows(root)
    owners = {path: [s.partition("@")[0] for s in e.steps] for path, e in receipt.files.items()}
    for path, entry in receipt.files.items():
        module = sys.modules.get(module_name(path))
        if module is None:
            continue
        data = (root / path).read_bytes()
        names = ", ".join(owners[path])
        if sha256(data) != entry.after:
            raise CppmegaError(
                "file-changed",
                f"{root / path} is not what was applied; it carries {names}.",
                "It was changed between the check at the start and now.",
                "cppmega status",
            )
        wanted = {e.symbol for name in owners[path] for e in edits.get(name, ()) if e.path == path}
        for symbol in _differing(module, data, str(root / path), wanted):
            raise CppmegaError(
                "stale-code",
                f"{path}:{symbol} in this process is not the code of its file; it carries {names}.",
                "Old bytecode or a late setattr: the patch is on disk, but not what runs.",
                "remove __pycache__ beside it, and look for whoever assigns that name",
            )


def _refuse_shadows(root: Path) -> None:
    """What ROOT has itself comes from there; other distributions share the name `megatron`."""
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
            raise CppmegaError(
                "shadowed",
                f"{name} was imported from {file}, not from {root}.",
                "The patched tree is not the one that trains.",
                "take the other folder off PYTHONPATH",
            )


def _differing(
    module: types.ModuleType, data: bytes, path: str, symbols: set[str]
) -> Iterator[str]:
    """Edited functions whose live code object is not the one that the file compiles to."""
    fresh: dict[str, list[types.CodeType]] = {}
    for name, code in _code_objects(compile(data, path, "exec", dont_inherit=True), ""):
        fresh.setdefault(name, []).append(code)
    for symbol in sorted(symbols):
        live = _live_code(module, plain(symbol))
        codes = fresh.get(plain(symbol), [])  # several: one for each branch of an `if`
        if live is not None and codes and not any(_same(live, code) for code in codes):
            yield symbol


def _code_objects(code: types.CodeType, prefix: str) -> Iterator[tuple[str, types.CodeType]]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            name = prefix + constant.co_name
            yield name, constant
            yield from _code_objects(constant, name + ".")


def _live_code(module: types.ModuleType, symbol: str) -> types.CodeType | None:
    """The code of a function that runs under that name, below decorators; None for other things."""
    thing: Any = module
    for part in symbol.split("."):
        try:
            thing = inspect.getattr_static(thing, part)
        except AttributeError:
            return None
    for _ in range(20):
        if isinstance(thing, staticmethod | classmethod):
            thing = thing.__func__
            continue
        inner = getattr(thing, "_torchdynamo_orig_callable", None) or getattr(
            thing, "__wrapped__", None
        )
        if inner is None:
            break
        thing = inner
    code = getattr(thing, "__code__", None)
    return code if isinstance(code, types.CodeType) else None


def _same(live: types.CodeType, fresh: types.CodeType) -> bool:
    if live.co_name != fresh.co_name:
        return True  # a decorator that hides the function: nothing can be said
    return (live.co_code, live.co_names, live.co_varnames) == (
        fresh.co_code,
        fresh.co_names,
        fresh.co_varnames,
    )
