"""The exception that users see: a name, what happened, why it matters, the next command."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence

_KEBAB = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*\Z")
_NAMESPACE = re.compile(r"[A-Z]+_|--?")
"""What all names of a kind begin with; it makes none of them similar to another."""
_ALIKE = 0.7
"""The least likeness of a suggestion, as `difflib` measures it."""


class CppmegaError(Exception):
    """An error with a stable name and a message of three parts.

    Code that handles one kind of error catches a subclass, and compares neither names nor messages.

    Args:
        name: kebab-case and stable across releases, since scripts may match on it.
        what: what happened, with the file or the value.
        why: what would go wrong otherwise.
        next: the command, or the edit, that resolves it.
    """

    name: str
    what: str
    why: str
    next: str

    def __init__(self, name: str, what: str = "", why: str = "", next: str = "") -> None:  # noqa: A002
        handled = sys.exception()
        if not what and isinstance(handled, CppmegaError):
            # Megatron's `build_module` re-raises an error as its type with only the message.
            name, what, why, next = handled.name, handled.what, handled.why, handled.next  # noqa: A001
        if not _KEBAB.match(name):
            raise ValueError(f"error names are kebab-case, got {name!r}")
        super().__init__(f"{name}: {what}")
        self.name, self.what, self.why, self.next = name, what, why, next

    def __reduce__(self) -> tuple[type[CppmegaError], tuple[str, str, str, str]]:
        """Keep all parts when pickled (torchrun and multiprocessing pickle exceptions)."""
        return type(self), (self.name, self.what, self.why, self.next)

    def render(self) -> str:
        """The name and the three parts as lines for stderr."""
        return f"error: {self.name}\n  what: {self.what}\n  why:  {self.why}\n  next: {self.next}"

    def as_json(self) -> dict[str, str]:
        """The name and the three parts for `--json`."""
        return {"name": self.name, "what": self.what, "why": self.why, "next": self.next}

    @classmethod
    def from_json(cls, parts: Mapping[str, str]) -> CppmegaError:
        """An error that another process has passed on as its name and its three parts."""
        return cls(parts["name"], parts["what"], parts["why"], parts["next"])


def closest(word: str, known: Iterable[str], limit: int = 1) -> list[str]:
    """The known words that are most similar to a misspelled one, best first."""
    import difflib  # only a message needs it

    names, match = sorted(known), _NAMESPACE.match(word)
    start = match[0] if match and any(name.startswith(match[0]) for name in names) else ""
    rests = [name.removeprefix(start) for name in names if name.startswith(start)]
    near = difflib.get_close_matches(word.removeprefix(start), rests, limit, _ALIKE)
    return [start + rest for rest in near]


def suggestion(candidates: Sequence[str]) -> str:
    """A sentence that offers the candidates, preceded by a space; empty if there are none."""
    return f" Did you mean {' or '.join(candidates)}?" if candidates else ""


def did_you_mean(word: str, known: Iterable[str], limit: int = 1) -> str:
    """A sentence that offers the closest known words, preceded by a space; empty if none is near.

    Example:
        >>> did_you_mean("forwrad", ["forward", "backward"])
        ' Did you mean forward?'
    """
    return suggestion(closest(word, known, limit))
