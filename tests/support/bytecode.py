"""Bytecode under a `PYTHONPYCACHEPREFIX`, where Python finds none of what was compiled before."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path


def link(prefix: Path) -> None:
    """Let a prefix begin with links to the bytecode of Python's library and of all packages.

    To compile what an import of torch needs takes three times as long as the import. Python
    replaces a link whose file does not fit its source any more, and never writes through it.
    """
    paths = sysconfig.get_paths()
    for folder in {paths[name] for name in ("stdlib", "purelib", "platlib")}:
        _link(folder, f"{prefix}{folder}")


def _link(folder: str, to: str) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name == "__pycache__":
                Path(to).mkdir(parents=True, exist_ok=True)
                with os.scandir(entry.path) as files:
                    for file in files:
                        Path(to, file.name).symlink_to(file.path)
            elif entry.name != "site-packages" and entry.is_dir(follow_symlinks=False):
                _link(entry.path, f"{to}/{entry.name}")
