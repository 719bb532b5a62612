"""Assignments to Megatron's modules that a guard of this process must expect."""

from __future__ import annotations

import sys
from typing import Any


def replace(owner: Any, name: str, new: Any) -> None:
    """Assign a name of a module or class.

    Importing the guard would make its code a part of every page that is proved on a CPU.
    """
    guarded = sys.modules.get(f"{__name__.partition('.')[0]}.guard.imports")
    (setattr if guarded is None else guarded.replace)(owner, name, new)
