"""Nothing on the path takes the name of a package that trains.

The folder of the launch, PYTHONPATH and the site-packages are looked at in Python's order. A
`torch.py` of one's own, or a second Megatron in front of the patched one, would be imported
instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from cppmega.check import Context, refuse
from cppmega.errors import CppmegaError

AFTER: tuple[str, ...] = ("one_root",)

_NAMES = (
    *("torch", "triton", "tilelang", "transformer_engine", "mamba_ssm", "liger_kernel"),
    *("numpy", "click", "libcst", "wrapt", "packaging", "cppmega"),
)
_MEGATRON = ("core", "training", "legacy", "rl")


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
        for name in _NAMES:
            whole = folder / name / "__init__.py"
            taken = whole if whole.is_file() else folder / f"{name}.py"
            if not taken.is_file() or (name == "cppmega" and folder == own):
                continue
            if not any(folder.glob(f"{name}-*-info")):  # a site-packages is no accident
                yield _error(place, taken, f"the installed {name}")


def _folders(environ: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
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
