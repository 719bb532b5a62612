"""Nothing on the path takes the name of a package that trains.

The folder of the launch, PYTHONPATH and the site-packages are looked at in Python's order. A
`torch.py` or a `random.py` of one's own, or a second Megatron in front of the patched one, would be
imported instead.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

from cppmega.check import Context, refuse
from cppmega.errors import CppmegaError

AFTER: tuple[str, ...] = ("one_root",)

_NAMES = (
    *("torch", "triton", "tilelang", "transformer_engine", "mamba_ssm", "liger_kernel"),
    *("numpy", "click", "libcst", "packaging", "cppmega"),
)
_MEGATRON = ("core", "training", "legacy", "rl")
_NO_ACCIDENT = {"conftest", "docs", "examples", "scripts", "setup", "test", "tests"}
"""Projects have them, some installed packages leave theirs behind, and nothing that trains asks."""


def check(context: Context) -> str:
    """Look at every folder in front of the installed packages.

    Raises:
        CppmegaError: `shadowing-path`.
    """
    refuse(_found(context))
    return f"megatron comes from {context.session.root} alone"


def _found(context: Context) -> Iterator[CppmegaError]:
    root = context.session.tree.root.resolve()
    own = Path(__file__).resolve().parents[2]
    for place, folder in _folders(context.environ):
        if folder == root:
            continue
        for part in _MEGATRON:
            if (folder / "megatron" / part).is_dir():
                yield _error(place, folder / "megatron" / part, f"the one in {root}")
                break
        if any(folder.glob("*.dist-info")):  # a site-packages is no accident
            continue
        for name, taken in sorted(_modules(folder).items()):
            if name in _NO_ACCIDENT or (name == "cppmega" and folder == own):
                continue
            if name in sys.stdlib_module_names:
                yield _error(place, taken, f"Python's own {name}")
            elif name in _NAMES or _installed(name, folder):
                yield _error(place, taken, f"the installed {name}")


def _modules(folder: Path) -> dict[str, Path]:
    """What can be imported from a folder, by name."""
    files = {path.stem: path for path in folder.glob("*.py")}
    return files | {path.parent.name: path for path in folder.glob("*/__init__.py")}


def _installed(name: str, folder: Path) -> bool:
    for site in {Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")}:
        if site != folder and any(
            path.is_file() for path in (site / name / "__init__.py", site / f"{name}.py")
        ):
            return True
    return False


def _folders(environ: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    if not environ.get("PYTHONSAFEPATH"):  # with it, Python does not look there
        yield "the folder of the launch", Path.cwd().resolve()
    for entry in environ.get("PYTHONPATH", "").split(os.pathsep):
        if entry and Path(entry).is_dir():
            yield "PYTHONPATH", Path(entry).resolve()


def _error(place: str, what: Path, instead_of: str) -> CppmegaError:
    return CppmegaError(
        "shadowing-path",
        f"{what} is found through {place} before {instead_of}.",
        "The code that was patched and proved would not be the code that trains.",
        "start from another folder, or take it off PYTHONPATH"
        if place == "PYTHONPATH"
        else f"start from another folder, or move {what} away",
    )
