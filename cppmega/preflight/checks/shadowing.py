"""Nothing on the path shadows a module that trains.

The launch folder, PYTHONPATH and the site-packages are searched in Python's order. A local
`torch.py` or `random.py`, or a second Megatron before the patched one, would be imported instead;
so would an `apex.py` where Megatron tries a package that is not installed.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import sysconfig
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from importlib.machinery import all_suffixes
from pathlib import Path

from cppmega.errors import CppmegaError
from cppmega.host.paths import PACKAGE
from cppmega.preflight.context import Context
from cppmega.preflight.findings import Problems

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
_IMPORTS = re.compile(
    rb"^[ \t]*import[ \t]+(?P<names>[\w.]+(?:[ \t]+as[ \t]+\w+)?(?:,[\w. \t]+)*)[ \t]*(?:#.*)?$"
    rb"|^[ \t]*from[ \t]+(?P<name>\w+)[\w.]*[ \t]+import\b"
    rb"|(?:import_module|find_spec|__import__)\(\s*[\"'](?P<called>\w+)",
    re.MULTILINE,
)
"""Prose such as `from the cache` or `import all of them` is no statement."""


def check(context: Context) -> Problems:
    """Search every folder that precedes the installed packages; yields `shadowing-path`."""
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
        for name, file in _first_importers(_unlisted(free, folder), asking).items():
            yield _error(place, free[name], f"an optional package that {file} tries")
    return f"megatron comes only from {context.session.root}"


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


def _first_importers(names: Collection[str], packages: Iterable[Path]) -> dict[str, Path]:
    """A file of the packages that imports each name; names that none imports are left out."""
    files: dict[str, Path] = {}
    for package in packages if names else ():
        imported = _imported(package)
        files = {name: imported[name] for name in names if name in imported} | files
    return files


@lru_cache(maxsize=16)
def _imported(package: Path) -> dict[str, Path]:
    """The top-level names that the files of a package import, each with one of the files."""
    importers: dict[str, Path] = {}
    for where, _, files in os.walk(package):
        for file in (Path(where, name) for name in files if name.endswith(".py")):
            for line in _IMPORTS.finditer(file.read_bytes()):
                for name in (line["names"] or line["name"] or line["called"]).split(b","):
                    importers.setdefault(re.split(rb"\W", name.strip())[0].decode(), file)
    return importers
