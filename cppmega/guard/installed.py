"""The runtime patches of this process: those that are armed, and those that are installed."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cppmega.page import Edit


@dataclass
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
