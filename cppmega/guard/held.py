"""The state of a guarded process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cppmega.errors import CppmegaError
from cppmega.overlay.receipt import Receipt
from cppmega.overlay.verbs import Session
from cppmega.page import Edit


@dataclass
class Guard:
    """The overlay that this process must hold, and how far its checks have come."""

    session: Session
    receipt: Receipt
    edits: dict[str, tuple[Edit, ...]]
    began: bool = False
    stepped: bool = False
    ended: set[str] = field(default_factory=set)
    """Later phases that have been checked: log, save."""
    idle: dict[str, str] = field(default_factory=dict)
    """Pages that this run need not reach, each with the reason."""
    arguments: Any = None
    """The run's arguments, as a custom loop has given them."""
    wanted: frozenset[str] = frozenset()
    """Pages that the run's recipe wants."""
    promised: dict[str, bool] = field(default_factory=dict)
    """Whether the run relies on a page whose kernels have declined a call."""
    excuse: str = ""
    """Why the script takes no step, if it has declared that."""
    refused: CppmegaError | None = None
    """The first refusal: a script that catches it still fails."""
    replaced: CppmegaError | None = None
    """Files were replaced on disk; the run ends once its checkpoint is saved."""
