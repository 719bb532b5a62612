"""The runtime patches of this process, armed and installed, and the pages that it has reached."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cppmega.page import Edit
from cppmega.rewriting.marks import FLAGS


@dataclass(slots=True, eq=False)
class Installed:
    """One replacement in this process."""

    page: str
    edit: Edit
    module: types.ModuleType
    owner: Any
    name: str
    original: Any
    """The former entry of the owner's `__dict__`, descriptors included."""
    replacement: Any
    alone: bool = False
    """Whether a check has found that nothing else holds the original."""


@dataclass
class Registry:
    """The runtime patches of one process."""

    armed: dict[tuple[str, str], Edit] = field(default_factory=dict)
    """By the names of page and target."""
    installed: list[Installed] = field(default_factory=list)
    listeners: list[Callable[[Any, str], None]] = field(default_factory=list)
    """Called with owner and name after every replacement."""


REGISTRY = Registry()


def entries() -> list[Installed]:
    """The replacements made in this process so far."""
    return list(REGISTRY.installed)


def waiting() -> list[str]:
    """Targets that are armed and whose module has not been imported."""
    done = {(item.page, item.edit.target) for item in REGISTRY.installed}
    return [target for page, target in REGISTRY.armed if (page, target) not in done]


REACHED: set[str] = set()
"""The flags of the runtime patches; a patched file carries its own."""


def reached() -> set[str]:
    """Names of the pages that this process has reached so far, over all imported modules."""
    names = set(REACHED)
    for module in list(sys.modules.values()):
        flags = getattr(module, "__dict__", {}).get(FLAGS)
        if isinstance(flags, set):
            names |= flags
    return names
