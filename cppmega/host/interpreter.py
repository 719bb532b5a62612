"""The interpreter that trains: commands that import torch and Megatron need that one."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from cppmega.errors import CppmegaError
from cppmega.host.packages import folder_of

_LIBRARIES = re.compile(r"(.+)/lib(?:64)?/python(3\.\d+)/(?:site|dist)-packages\Z")
"""Where the packages of an environment are, and the Python version that they are for."""


def require_torch(root: Path, module: str, *, or_below: bool = False) -> None:
    """Refuse to start processes that could not import torch.

    Args:
        root: the folder that holds megatron/.
        module: the command, as `python -m` names it.
        or_below: the processes also import from that folder, where torch may be.

    Raises:
        CppmegaError: `package-missing`.
    """
    if folder_of("torch") is not None or (or_below and _holds_torch(root)):
        return
    raise CppmegaError(
        "package-missing",
        f"The interpreter of this command, {sys.executable}, has no torch.",
        "Megatron cannot be imported there. A result would be about this environment, not about "
        "the one that trains.",
        _equivalent_command(root, module),
    )


def _equivalent_command(root: Path, module: str) -> str:
    """The command to type, with the interpreter that trains."""
    trains = of_environment(root)
    if trains is None:
        return f"PYTHON -m {module}, where PYTHON is the interpreter that trains"
    if trains.parent.parent.samefile(sys.prefix):
        return f"{trains} -m pip install torch"
    if any(root.glob("cppmega-*.dist-info")):
        return f"{trains} -m {module}"
    return f"{trains} -m {module}, after cppmega has been installed there as it was here"


def activated() -> Iterator[Path]:
    """The package folders of an environment that is active in the shell, and is not this one.

    cppmega may be installed as a tool: then the active environment is the one that trains.
    """
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        prefix = os.environ.get(variable)
        if prefix and Path(prefix).resolve() != Path(sys.prefix).resolve():
            yield from sorted(Path(prefix).glob("lib/python3.*/site-packages"))


def of_environment(root: Path) -> Path | None:
    """The interpreter of the environment whose packages are in a folder; None if there is none."""
    match = _LIBRARIES.match(str(root.absolute()))
    if match is None:
        return None
    interpreter = Path(match[1], "bin", "python")
    return interpreter if interpreter.exists() else None


def _holds_torch(root: Path) -> bool:
    """Whether this Python could import torch from the folder that holds megatron/."""
    match = _LIBRARIES.match(str(root.absolute()))
    ours = ".".join(map(str, sys.version_info[:2]))
    return (root / "torch" / "__init__.py").is_file() and (match is None or match[2] == ours)
