"""What a patch page declares: data, and the functions the engine calls.

A page is one file of a catalogue. Its docstring has the labels What, Why, Upstream, Remove and
Numerics; `PATCH` is its header; `fixed_upstream(source)` says from the code whether upstream has
the fix; `verify()` proves the behaviour with values. `cppmega new NAME` writes an empty page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

from cppmega.errors import CppmegaError

Kind = Literal["source", "class-swap", "method-wrap", "function-swap"]
"""`source` is written to disk; the others are installed when the module is imported."""

Reached = Literal["startup", "forward", "backward", "log", "save", "never"]
"""When a run must have passed through the patched code: by the end of its first step, by the end of
Megatron's first log, of its first checkpoint; `never` for code no run need reach."""

KINDS: tuple[str, ...] = get_args(Kind)
REACHED: tuple[str, ...] = get_args(Reached)


def left_alone(node: Any) -> Any:
    """The edit of a text that the page knows and that needs no change.

    Versions differ in how many symbols a patch must edit. Where a symbol that is edited in other
    versions is already right, the page pins it with this; otherwise it could not be distinguished
    from one that drifted, and the page would be applied by half.
    """
    return node


@dataclass(frozen=True, slots=True)
class Edit:
    """One symbol, the texts of it that we know, and what becomes of it.

    A page may hold several edits of one symbol, each for other texts of it.
    """

    target: str
    """`path/below/root.py:Qualified.name`; functions nest with a dot like methods do. Where a file
    defines a name several times, `name#2` is the second of them."""
    pins: Mapping[str, str]
    """Version of the distribution -> fingerprint of the target's pristine text."""
    edit: Callable[[Any], Any]
    """Source: libcst node -> libcst node. Runtime kinds: the original object -> its replacement."""
    kind: Kind = "source"
    imports: tuple[str, ...] = ()
    """Import statements the new text needs; they become part of the target."""
    helpers: tuple[Callable[..., Any], ...] = ()
    """Functions or classes of the page that are written before the target."""
    overrides: tuple[str, ...] = ()
    """Class swap only: the methods that the replacement overrides; they are pinned."""
    mark: str | None = None
    """The function below the target that carries the reached-mark; default: the target itself,
    or `__init__` of a class. "" (source only): none, because a call may still go stock's way from
    here; another edit of the page carries it."""
    distribution: str = "megatron-core"

    @property
    def path(self) -> str:
        """The file, relative to ROOT, with forward slashes."""
        return self.target.partition(":")[0]

    @property
    def symbol(self) -> str:
        """The qualified name within the file."""
        return self.target.partition(":")[2]


@dataclass(frozen=True, slots=True)
class Patch:
    """The header of a page."""

    edits: tuple[Edit, ...]
    reached: Reached
    """When a run must pass through at least one edited symbol."""
    feature: tuple[str, ...] = ()
    """Targets without which there is nothing to fix; if one of them exists nowhere in the tree,
    the patch is not applicable."""
    when: Callable[[Any], bool] | None = None
    """Over the run's arguments (Megatron's namespace): must this run reach the patch at all?"""
    refuses: Callable[[Any, Mapping[str, tuple[int, ...]]], Iterable[CppmegaError]] | None = None
    """Over the run's arguments, and the shapes of the tensors from which it resumes (none where it
    starts afresh): what this page cannot serve. The preflight refuses the launch with it."""
    needs: tuple[str, ...] = ("cpu",)
    """What `verify` needs: cpu, cuda, sm_90, te, triton, tilelang, or an importable module."""
    gate: str | None = None
    """A `CPPMEGA_*` variable that turns the patch on; None: always on."""
    variables: tuple[str, ...] = ()
    """Other `CPPMEGA_*` variables that the patched code reads."""
    wanted_by: Callable[[Any], bool] | None = None
    """Over a recipe: does a value of its fields mean nothing, or go wrong, without this patch?"""
    provides: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """What the preflight and the estimates may count on once the patch is in the code, by the name
    they ask for."""
    after: tuple[str, ...] = ()
    """Pages whose edits come before ours where we edit the same symbol."""

    @property
    def kind(self) -> str:
        """The kinds of the edits, joined by `+` where a page mixes them."""
        return "+".join(dict.fromkeys(edit.kind for edit in self.edits))

    def marks(self, edit: Edit) -> bool:
        """Whether the edited symbol says that a run passed through the patch."""
        return self.reached != "never" and edit.mark != ""

    def shapes(self) -> list[dict[str, dict[str, Edit]]]:
        """What the pinned versions look like: target -> fingerprint -> edit, one per shape.

        Versions that have the same targets form one shape, so a tree with the text of one version
        in one symbol and of another version in a second symbol is still known.
        """
        versions = dict.fromkeys(version for edit in self.edits for version in edit.pins)
        by_targets: dict[frozenset[str], dict[str, dict[str, Edit]]] = {}
        for version in versions:
            row = {edit.target: edit for edit in self.edits if version in edit.pins}
            shape = by_targets.setdefault(frozenset(row), {target: {} for target in row})
            for target, edit in row.items():
                shape[target][edit.pins[version]] = edit
        return sorted(by_targets.values(), key=len, reverse=True)


class Source(Protocol):
    """The view of a tree that `fixed_upstream` gets: its code, never its version."""

    def text(self, target: str) -> str:
        """The source of one symbol without comments, or "" where it is missing."""

    def file(self, path: str) -> str:
        """The text of one file, or "" where it is missing."""


@dataclass(frozen=True, slots=True)
class Page:
    """A loaded page: its header and what the engine knows about its file."""

    name: str
    patch: Patch
    doc: str
    revision: str
    """Hash of the page's code and of all that it reaches, comments and docstrings left out."""
    path: str
    catalogue: str
    """`builtin`, or the folder given by `--patches`."""
    fixed_upstream: Callable[[Source], bool] | None = None
    verify: Callable[[], None] | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    text: str = ""
    """Hash of the page's own files as they are: comments in its functions are written too."""
    reached: Mapping[str, str] = field(default_factory=dict)
    """Modules of this package that it imports, outside of the engine -> hash of their code."""
