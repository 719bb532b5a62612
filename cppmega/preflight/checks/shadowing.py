"""Nothing on the path shadows a module that trains.

The launch folder, PYTHONPATH and the site-packages are searched in Python's order. A local
`torch.py` or `random.py`, or a second Megatron before the patched one, would be imported instead;
so would an `apex.py` where Megatron tries a package that is not installed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
import zipfile
from collections.abc import Iterator, Mapping
from importlib.machinery import all_suffixes
from pathlib import Path

from cppmega.errors import CppmegaError
from cppmega.host.paths import PACKAGE
from cppmega.preflight import importers
from cppmega.preflight.context import Context
from cppmega.preflight.findings import refuse

AFTER: tuple[str, ...] = ("one_root",)

_NAMES = (
    *("torch", "triton", "tilelang", "transformer_engine", "mamba_ssm", "liger_kernel"),
    *("numpy", "click", "libcst", "packaging", "cppmega"),
)
_ASKING = ("torch", "transformer_engine", "mamba_ssm", "liger_kernel", "tilelang")
"""Installed packages whose optional imports count, in addition to those of the tree."""
_MEGATRON = ("core", "training", "legacy", "rl")
_HARMLESS = {"conftest", "docs", "examples", "scripts", "setup", "test", "tests"}
"""Names that projects and careless packages use, and that no training code imports."""
_OWN = PACKAGE.parent


def check(context: Context) -> str:
    """Search every folder that precedes the installed packages.

    Raises:
        CppmegaError: `shadowing-path`.
    """
    refuse(_shadowing_modules(context))
    return f"megatron comes only from {context.session.root}"


def _shadowing_modules(context: Context) -> Iterator[CppmegaError]:
    tree = context.session.read_tree()
    root, packages = tree.root.resolve(), tree.packages
    for place, folder in _folders(context.environ):
        if folder == root:
            continue
        for part in _MEGATRON:
            if (folder / "megatron" / part).is_dir():
                yield _error(place, folder / "megatron" / part, f"the one in {root}")
                break
        free = {}
        for name, module in sorted(_modules(folder).items()):
            instead_of = _shadowed(name, folder)
            if instead_of and module.is_file():
                yield _error(place, module, instead_of)
            elif not (name in sys.stdlib_module_names or _installed(name, folder)):
                free[name] = module
        asking = [*packages, *(site / name for site in _sites() for name in _ASKING)]
        for name, file in importers.first_importers(_unlisted(free, folder), asking).items():
            yield _error(place, free[name], f"an optional package that {file} tries")


def _shadowed(name: str, folder: Path) -> str:
    """The module that a name in a folder shadows; empty where it shadows none.

    Modules that a distribution installed into that folder are there on purpose.
    """
    if name in _HARMLESS or (name == "cppmega" and folder == _OWN) or _listed(name, folder):
        return ""
    if name in sys.stdlib_module_names:
        return f"Python's own {name}"
    return f"the installed {name}" if name in _NAMES or _installed(name, folder) else ""


def _unlisted(free: Mapping[str, Path], folder: Path) -> list[str]:
    known = {*_HARMLESS, "cppmega", "megatron"}
    return [name for name in free if name not in known and not _listed(name, folder)]


def _modules(folder: Path) -> dict[str, Path]:
    """The modules that can be imported from a folder or an archive, by name.

    A folder without an `__init__` is a namespace, which is used where no other path has the name.
    """
    if folder.is_file():
        return dict.fromkeys(_in_archive(folder), folder)
    modules: dict[str, Path] = {}
    for entry in sorted(folder.iterdir()):
        if entry.is_dir():
            inits = (entry / f"__init__{suffix}" for suffix in all_suffixes())
            init = next((file for file in inits if file.is_file()), None)
            if init is not None:
                modules[entry.name] = init
            elif any(entry.glob("*.py")):
                modules.setdefault(entry.name, entry)
            continue
        suffix = next((s for s in all_suffixes() if entry.name.endswith(s)), None)
        if suffix is not None and entry.name.removesuffix(suffix).isidentifier():
            modules.setdefault(entry.name.removesuffix(suffix), entry)
    return modules


def _in_archive(file: Path) -> Iterator[str]:
    with contextlib.suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(file) as archive:
        for name in archive.namelist():
            yield name.partition("/")[0].removesuffix(".py").removesuffix(".pyc")


def _listed(name: str, folder: Path) -> bool:
    """Whether a distribution in a folder lists one of its modules in its RECORD."""
    ends = tuple(f"\n{name}{end}".encode() for end in ("/", *all_suffixes()))
    for record in folder.glob("*.dist-info/RECORD"):
        data = b"\n" + record.read_bytes()
        if any(end in data for end in ends):
            return True
    return False


def _installed(name: str, folder: Path) -> bool:
    files = (f"{name}/__init__.py", f"{name}.py")
    return any(site != folder and (site / file).is_file() for site in _sites() for file in files)


def _sites() -> set[Path]:
    return {Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")}


def _folders(environ: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    if not environ.get("PYTHONSAFEPATH"):  # with it, Python leaves that folder out
        yield "the launch folder", Path.cwd().resolve()
    path = environ.get("PYTHONPATH", "")
    for entry in path.split(os.pathsep) if path else ():
        if Path(entry).exists():  # an empty entry is the working directory
            yield "PYTHONPATH", Path(entry).resolve()


def _error(place: str, what: Path, instead_of: str) -> CppmegaError:
    return CppmegaError(
        "shadowing-path",
        f"{what} is found through {place} before {instead_of}.",
        "The code that was patched and proved would not be the code that trains.",
        "start from another folder, or remove it from PYTHONPATH"
        if place == "PYTHONPATH"
        else f"start from another folder, or move {what} away",
    )
