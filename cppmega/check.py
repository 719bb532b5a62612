"""What a preflight check may look at, and what it may answer.

A check is one file of `cppmega/checks/`: a docstring that says what it refuses, `AFTER` (the checks
that must hold before it can say anything) and `check(context)`, which returns a line of detail,
raises the error that must stop the launch, or raises `NotApplicable`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cppmega import dsa_widths, receipt
from cppmega.errors import CppmegaError
from cppmega.memory import Estimate, estimate
from cppmega.overlay import Session
from cppmega.plan import Plan
from cppmega.receipt import Receipt
from cppmega.recipe import Recipe
from cppmega.wanted import provided, wanted_patches

if TYPE_CHECKING:
    from cppmega.devices import Devices
    from cppmega.line import Line

State = Literal["ok", "failed", "not-applicable", "not-run"]


class NotApplicable(Exception):  # noqa: N818  (an answer, not an error)
    """There is nothing to check here; the message says why."""


class Refused(Exception):  # noqa: N818
    """Several things are wrong at once: a user wants to know all of them."""

    def __init__(self, errors: Iterable[CppmegaError]) -> None:
        self.errors = tuple(errors)
        super().__init__("; ".join(map(str, self.errors)))


def refuse(errors: Iterable[CppmegaError]) -> None:
    """Raise what was found; returns where nothing was."""
    found = tuple(errors)
    if found:
        raise Refused(found)


class Remark(str):
    """Detail of a check that holds, and that is to be read even where all is well."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer of one check; a check that found several things wrong has several."""

    check: str
    state: State
    name: str = ""
    """Of the error, kebab-case; empty unless `failed`."""
    what: str = ""
    """What happened; or the detail of a check that holds, or why there was nothing to check."""
    why: str = ""
    next: str = ""

    @property
    def is_remark(self) -> bool:
        """It holds, and is to be read all the same."""
        return isinstance(self.what, Remark)

    @property
    def error(self) -> CppmegaError:
        """A failure as the exception that stops a launch."""
        return CppmegaError(self.name, self.what, self.why, self.next)

    def as_json(self) -> dict[str, str]:
        """One entry of `checks` in the JSON answer."""
        return {
            "check": self.check,
            "state": self.state,
            "name": self.name,
            "what": self.what,
            "why": self.why,
            "next": self.next,
        }


@dataclass
class Context:
    """One launch, before it happens. Everything slow is looked at once, when first asked for."""

    root: Path | None = None
    """Folder that holds megatron/; None: the one Python would import."""
    catalogues: Sequence[Path] | None = None
    recipe: Recipe | None = None
    recipe_file: Path | None = None
    """Where the recipe was read from, if it is not a shipped one."""
    arguments: tuple[str, ...] = ()
    """Words of the launch line after the recipe: the trainer's own options and Megatron's.
    Without a recipe: a whole line for Megatron's parser."""
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    """What the training processes will see."""
    training_machine: bool = field(default_factory=lambda: gpu_here())
    """This is the machine that trains: it has a GPU."""
    nodes: int = 1
    """Hosts over which the recipe's GPUs are spread."""
    folder: Path | None = None
    """Where the run will write, if it is known: a launcher's run folder."""
    deep: bool = False
    """Also run each kernel's parity on this GPU: minutes instead of seconds."""

    accept: tuple[str, ...] = ()
    """Edits that are accepted, as `FILE=SHA256`, besides those of the recipe and of the line."""

    @cached_property
    def accepted(self) -> Mapping[str, str]:
        """Every edit of Megatron that this launch may train: path -> SHA-256.

        Raises:
            CppmegaError: `bad-accept`, `wrong-usage`.
        """
        from cppmega import accepted

        named = self.recipe.accepted_edits if self.recipe is not None else ()
        return accepted.asked(named, (*self.accept, *self.options["accept"]))

    @cached_property
    def options(self) -> Mapping[str, Any]:
        """The trainer's options on the line, by parameter; a loop of its own has them alone.

        Raises:
            CppmegaError: `wrong-usage`.
        """
        from cppmega import line

        return line.read(self.arguments)

    @property
    def is_loop(self) -> bool:
        """Whether a loop of our own is launched, whose line no parser of Megatron sees."""
        return self.recipe is not None and self.recipe.kind == "loop"

    @cached_property
    def session(self) -> Session:
        """The tree and its catalogue."""
        return Session(self.root, self.catalogues)

    @cached_property
    def receipt(self) -> Receipt:
        """What was applied; an empty one where nothing was."""
        return receipt.load(self.session.tree).receipt

    @cached_property
    def plan(self) -> Plan:
        """Every page's state, with the gates of the last apply."""
        return self.session.plan(None, {**self.environ, **self.receipt.gates})

    @cached_property
    def wanted_patches(self) -> tuple[str, ...]:
        """Patches without which the recipe must not start; none where there is no recipe.

        Raises:
            CppmegaError: `bad-wanted-by`.
        """
        return wanted_patches(self.recipe, self.session.pages) if self.recipe is not None else ()

    @cached_property
    def memory(self) -> Estimate:
        """What the recipe takes on its fullest GPU; only asked for where there is a recipe."""
        assert self.recipe is not None
        widened = provided(self.session.pages.values(), dsa_widths.TILELANG)
        return estimate(self.recipe, widened)

    @property
    def needs_gpu(self) -> bool:
        """Whether the launch cannot do without one; a launch of unknown content can."""
        return self.recipe is not None and self.recipe.gpus > 0

    @cached_property
    def line(self) -> Line:
        """The launch line.

        Raises:
            NotApplicable: nothing that Megatron parses is launched.
            CppmegaError: it cannot be written for the installed version.
        """
        from cppmega import line

        version = self.session.tree.version
        return line.of(self.recipe, self.arguments, self.options, version, self.environ)

    @cached_property
    def process(self) -> dict[str, Any]:
        """The answers of a process that imported what the training processes will import."""
        from cppmega import children

        return children.imported_process(self)

    @cached_property
    def devices(self) -> Devices:
        """The GPUs of this machine as a training process would see them.

        Raises:
            NotApplicable: the launch needs none.
            CppmegaError: `no-gpu`, `driver-broken`.
        """
        from cppmega import devices

        return devices.look(self)


def gpu_here() -> bool:
    """Whether this machine has an NVIDIA driver with a device, without importing torch."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()
