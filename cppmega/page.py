"""The declarations of a patch page: data, and the functions that the engine calls.

A page is one file of a catalogue. Its docstring has the labels What, Why, Upstream, Remove and
Numerics; `PATCH` is its header; `fixed_upstream(source)` decides from the code whether upstream
has the fix; `verify()` proves the behavior with values. `cppmega new NAME` writes an empty page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

if TYPE_CHECKING:
    from cppmega.rules.rule import Rule

Kind = Literal["source", "class-swap", "method-wrap", "function-swap"]
"""`source` edits are written to disk; the others are installed when the module is imported."""

Reached = Literal["startup", "forward", "backward", "log", "save", "never"]
"""When a run must have passed through the patched code: by the end of its first step, or of
Megatron's first log or checkpoint; `never` for code that no run needs to reach."""

Purpose = Literal["fix", "speed", "feature"]
"""What a page is to its user. `fix`: stock is wrong, or dies. `speed`: the same results sooner, or
as `Numerics` says. `feature`: only runs that ask for it change."""

KINDS: tuple[str, ...] = get_args(Kind)
PURPOSES: tuple[str, ...] = get_args(Purpose)
REACHED: tuple[str, ...] = get_args(Reached)


def left_alone(node: Any) -> Any:
    """Leave a text that the page pins unchanged.

    Versions differ in how many symbols a patch must edit. If a symbol that is edited in other
    versions is already right, the page pins it with this edit; otherwise it could not be
    distinguished from a symbol that drifted, and half of the page would be applied.
    """
    return node


@dataclass(frozen=True, slots=True)
class Edit:
    """An edit of one symbol, and the texts that it is pinned to.

    A page may have several edits of one symbol, each for different texts.
    """

    target: str
    """`path/below/root.py:Qualified.name`; nested functions have a dot, as methods do. If a
    file defines a name several times, `name#2` is the second definition.

    Statements of a module or of a class have targets, too: `CONSTANT` and `Class.field` by a name
    that they assign, so that a `try` block of imports has the name of its flag, and `import.NAME`
    by a name that the module imports. The pin is of that statement alone, and the edit may add
    others next to it."""
    pins: Mapping[str, str]
    """Version of the distribution -> fingerprint of the target's pristine text."""
    edit: Callable[[Any], Any]
    """Source: libcst node -> libcst node. Runtime kinds: the original object -> its replacement."""
    kind: Kind = "source"
    imports: tuple[str, ...] = ()
    """Import statements that the new text needs; they become part of the target."""
    helpers: tuple[Callable[..., Any], ...] = ()
    """Functions or classes of the page that are written before the target."""
    overrides: tuple[str, ...] = ()
    """Class swap only: the methods that the replacement overrides; they are pinned."""
    mark: str | None = None
    """The function below the target that carries the reached-mark; default: the target itself,
    or `__init__` of a class. "" (source only): none, because a call may reach it without
    using the patch; another edit of the page carries the mark."""
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
    purpose: Purpose = "fix"
    feature: tuple[str, ...] = ()
    """Definitions without which there is nothing to fix; if the tree lacks one, the patch is not
    applicable. A target of the page shows nothing: upstream may rename it and keep the bug."""
    builds_on: tuple[str, ...] = ()
    """Definitions that the page's code relies on, whether there is something to fix or not; the
    page has not been ported to a tree that lacks one, and is `unported` there."""
    when: Callable[[Any], bool] | None = None
    """Called with the run's arguments, as attributes by the names of Megatron's parser, whatever a
    loop has: whether it must reach the patch. What was not given and is asked for ends the run."""
    rules: tuple[Rule, ...] = ()
    """What runs may be with this page in the code, besides the rules of `cppmega.rules`."""
    needs: tuple[str, ...] = ("cpu",)
    """Requirements of `verify`: cpu, cuda, sm_90, te, triton, tilelang, an importable module."""
    gate: str | None = None
    """A `CPPMEGA_*` variable that turns the patch on; None: always on."""
    variables: tuple[str, ...] = ()
    """Other `CPPMEGA_*` variables that the patched code reads."""
    wanted_by: Callable[[Any], bool] | None = None
    """Called with a recipe: whether one of its values is wrong, or ignored, without this patch."""
    asked_by: tuple[str, ...] = ()
    """Megatron's arguments with which a run that does not need the page would: `cppmega advise`
    names them. One that begins with `--no-` is to be left out."""
    provides: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """By name, the values on which checks and estimates may rely once the patch is in the code."""
    after: tuple[str, ...] = ()
    """Pages whose edits of a symbol come before those of this page."""

    @property
    def kind(self) -> str:
        """The kinds of the edits, joined by `+` where a page mixes them."""
        return "+".join(dict.fromkeys(edit.kind for edit in self.edits))

    @property
    def distributions(self) -> tuple[str, ...]:
        """The distributions whose files the page edits."""
        return tuple(dict.fromkeys(edit.distribution for edit in self.edits))

    def marks(self, edit: Edit) -> bool:
        """Whether the edited symbol records that a run passed through the patch."""
        return self.reached != "never" and edit.mark != ""

    def shapes(self) -> list[dict[str, dict[str, Edit]]]:
        """Return the shapes of the pinned versions, each as target -> fingerprint -> edit.

        Versions that have the same targets form one shape, so a tree with one version's text in one
        symbol and another version's text in a second symbol is still recognized.
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
    """The view of a tree that `fixed_upstream` receives: its code, never its version."""

    def text(self, target: str) -> str:
        """The source of one symbol without comments, or "" if it is missing."""

    def file(self, path: str) -> str:
        """The text of one file, or "" if it is missing."""


@dataclass(frozen=True, slots=True)
class Page:
    """A loaded page: its header and what the engine knows about its file."""

    name: str
    patch: Patch
    doc: str
    revision: str
    """Hash of the page's code and everything that it reaches, without comments and docstrings."""
    path: str
    catalogue: str
    """`builtin`, or the folder given by `--patches`."""
    subject: str = ""
    """The folder of the catalogue that holds it; empty for a catalogue without subjects."""
    fixed_upstream: Callable[[Source], bool] | None = None
    verify: Callable[[], None] | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    text: str = ""
    """Hash of the page's own files with comments, which are written with its functions."""
    reached: Mapping[str, str] = field(default_factory=dict)
    """Modules of this package that it imports, except the engine's -> hash of their code."""

    @property
    def title(self) -> str:
        """The first line of its docstring."""
        return self.doc.strip().partition("\n")[0]

    @property
    def only_where_asked(self) -> bool:
        """Whether it is applied only where somebody asks for speed at the price of stock's bits."""
        bitwise = self.labels.get("Numerics", "").startswith("none")
        return self.patch.purpose == "speed" and not bitwise
