"""The folder of the package, and the catalogue and the recipes that ship with it."""

from __future__ import annotations

from pathlib import Path

import cppmega

PACKAGE = Path(cppmega.__file__).resolve().parent


def shipped(name: str) -> Path:
    """A folder that ships with the package: below it in a wheel, next to it in a checkout."""
    below = PACKAGE / name
    return below if below.is_dir() else PACKAGE.parent / name
