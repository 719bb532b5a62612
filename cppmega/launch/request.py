"""A launch as requested on the command line, and as the preflight has passed it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cppmega.preflight.context import Context
from cppmega.recipe import Recipe
from cppmega.recipe.run_options import RunOptions
from cppmega.runs.manifest import DataRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """The request of the command line."""

    recipe: str
    """A shipped name, a path, or a script's path; empty: that of the resumed run."""
    options: RunOptions
    """The trainer's options."""
    given: frozenset[str] = frozenset()
    """Options that were named, which matters for those with their default value."""
    arguments: tuple[str, ...] = ()
    """Megatron's own arguments, or the script's, after `--`."""
    runs: Path | None = None
    name: str | None = None
    tmux: str | None = None
    nodes: int = 1
    rdzv: str | None = None
    nproc: int | None = None
    restarts: int = 0
    """How often torchrun starts the ranks again after one has failed."""
    arguments_from: tuple[str, ...] = ()
    allows_unknown: bool = False
    """See `Context`; both of a script."""
    resume: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidatedLaunch:
    """A launch that every check has passed. Nothing has been written yet."""

    request: LaunchRequest
    recipe: Recipe | None
    """The recipe with the changes of `--set` and the arguments after `--`; None: a script."""
    name: str
    source: Path
    """Name and file of the recipe or the script."""
    context: Context
    """The context of the preflight, whose answers are reused."""
    folder: Path
    nproc: int
    """Ranks on each host."""
    torchrun: tuple[str, ...]
    """torchrun's command line, without the log folder, which is different on each host."""
    argv: tuple[str, ...]
    """Megatron's arguments, or the script's; empty for a loop, which parses nothing."""
    data: DataRecord
    checks: Mapping[str, str] = field(default_factory=dict)
    """Name of each check -> its state."""

    @property
    def options(self) -> RunOptions:
        """The trainer's options, with this run's own folders."""
        return self.context.options

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment of the ranks."""
        return self.context.environ
