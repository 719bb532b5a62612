"""Modules under the names that they had in the release before, which patched files on disk import.

Each is a stand-in in `sys.modules` that loads the module of its new name when something is read
from it, so that the old names cost nothing until they are used.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any


class _Moved(ModuleType):
    """A module whose contents are those of others, under their new names."""

    def __init__(self, old: str, new: tuple[str, ...]) -> None:
        super().__init__(old, f"Moved to {' and '.join(new)}; this name stays for one release.")
        self._moved_to = new

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what looks through sys.modules reads these, and needs none
            raise AttributeError(name)
        *others, last = self._moved_to
        for each in others:
            if hasattr(module := importlib.import_module(each), name):
                return getattr(module, name)
        return getattr(importlib.import_module(last), name)


def keep_names(package: str, moved: Mapping[str, str]) -> None:
    """Let modules of a package be imported under their old names.

    Args:
        package: that of the old names.
        moved: old name -> new names, absolute and separated by spaces, of which each attribute is
            read from the first that has it.
    """
    for old, new in moved.items():
        stand_in = _Moved(f"{package}.{old}", tuple(new.split()))
        sys.modules[stand_in.__name__] = stand_in
        setattr(sys.modules[package], old, stand_in)
