"""What a command found, independent of the format in which it is reported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Result = Literal["passed", "skipped", "note", "warning", "failed", "error"]
"""`error`: the command could not answer; `note` and `warning` do not fail a command."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a file."""

    root: Path
    """The folder to which the path is relative."""
    path: str
    """Path with forward slashes."""
    line: int | None = None
    """Counted from 1; None if it is not known."""

    @property
    def file(self) -> Path:
        """The file, with an absolute path."""
        return (self.root / self.path).absolute()

    def __str__(self) -> str:
        return self.path if self.line is None else f"{self.path}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One patch, one proof or one check."""

    name: str
    """Name of the patch or the check."""
    rule: str
    """The state, or the name of the error; in kebab case."""
    result: Result
    message: str = ""
    """What happened."""
    next: str = ""
    """What the user should do about it."""
    place: Place | None = None
    """The code that a patch edits."""
    page: Path | None = None
    """The file of the patch."""
    seconds: float = 0.0

    @property
    def text(self) -> str:
        """All of its text, starting with the name."""
        head = f"{self.name}: {self.rule}" + (f" ({self.place})" if self.place else "")
        todo = f"next: {self.next}" if self.next else ""
        return "\n".join(filter(None, [head, self.message, todo]))


@dataclass(frozen=True, slots=True)
class Report:
    """The answer of a command."""

    command: str
    """Name of the command, such as `drift`."""
    entries: tuple[Entry, ...]
    meanings: Mapping[str, str] = field(default_factory=dict)
    """Rule -> what it means."""

    def remarkable(self) -> Iterator[Entry]:
        """The entries that need a reader's attention."""
        quiet = ("passed", "skipped")
        return (entry for entry in self.entries if entry.result not in quiet)
