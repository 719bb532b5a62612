"""Where Python finds a package, without importing it."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def folder_of(package: str) -> Path | None:
    """The folder of an importable package; None if there is none."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a module that was created in memory
        return None
    return Path(spec.origin).parent if spec is not None and spec.origin else None
