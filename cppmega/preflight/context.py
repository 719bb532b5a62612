"""The context of the preflight checks: one launch, before it happens.

A check is one file of `cppmega/preflight/checks/`: a docstring that states what must hold, `AFTER`
(the checks that must hold before it can answer, if any), `APART` (its errors that keep no other
check from answering, if any) and `check(context)`, which returns a line of detail, yields or raises
the errors that must stop the launch, or raises `NotApplicable` or `NotRun`.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from cppmega import calls
from cppmega.catalogue.page_rules import ProvidedBy, provided
from cppmega.checkpoints import files as checkpoint_files
from cppmega.checkpoints import tracker as checkpoint_tracker
from cppmega.data.reading import Allowance
from cppmega.errors import CppmegaError
from cppmega.host import allocator, configuration, console, env
from cppmega.host.configuration import Configuration
from cppmega.overlay import receipt
from cppmega.overlay.plan import Plan
from cppmega.overlay.receipt import Receipt
from cppmega.overlay.verbs import Session
from cppmega.overlay.wanted import wanted_patches
from cppmega.preflight import devices
from cppmega.preflight.ask import ask
from cppmega.preflight.devices import Devices
from cppmega.preflight.findings import NotApplicable
from cppmega.preflight.launch_line import LaunchLine
from cppmega.preflight.messages import ParsedLine, RankAnswer, RankOrder
from cppmega.recipe import Recipe
from cppmega.recipe.memory import Estimate, estimate
from cppmega.recipe.run_options import RunOptions
from cppmega.rules.rule import Run
from cppmega.sizes import dsa_widths
from cppmega.training import data_requirements
from cppmega.training.batch import DataTokens
from cppmega.training.requirements import IN_THE_CODE

_SECONDS = 60.0
"""Limit for the first reading of a launch's datasets; a separate command may take longer."""


@dataclass
class Context:
    """One launch, before it happens. Whatever is slow is computed once, on first use."""

    root: Path | None = None
    """Folder that holds megatron/; None: the one that Python would import."""
    catalogues: Sequence[Path] | None = None
    recipe: Recipe | None = None
    recipe_file: Path | None = None
    """File of the recipe, if it is not a shipped one."""
    options: RunOptions = field(default_factory=RunOptions)
    """The trainer's options of this start."""
    arguments: tuple[str, ...] = ()
    """Megatron's own arguments, added to the recipe's. Without a recipe: everything that
    Megatron's parser gets."""
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    """Variables that the training processes will see."""
    training_machine: bool = field(default_factory=lambda: gpu_here())
    """Whether this machine trains: it has a GPU."""
    nodes: int = 1
    """Hosts over which the recipe's GPUs are spread."""
    world: int | None = None
    """Number of ranks of a launch without a recipe; None: see `LaunchLine.world`."""
    folder: Path | None = None
    """Where the run will write, if it is known: a launcher's run folder."""
    allows_unknown: bool = False
    """Whether arguments that Megatron's parser does not know are left to the script. A recipe has
    none."""
    arguments_from: tuple[str, ...] = ()
    """What the script imports to add arguments: `MODULE`, `MODULE:FUNCTION`."""
    configuration: Configuration = field(default_factory=configuration.read)
    """The team's settings here, which may name checks that are not run, each with its reason."""
    only_parses: bool = False
    """Whether the line is only read, so that nothing need be applied yet."""
    deep: bool = False
    """Also compare every kernel with its reference: minutes instead of seconds."""
    unsound: set[str] = field(default_factory=set)
    """The checks so far that do not hold, so that what depends on them cannot be asked."""

    @cached_property
    def accepted(self) -> Mapping[str, str]:
        """Every edit of Megatron that this launch may train: path -> SHA-256.

        Raises:
            CppmegaError: `bad-accept`.
        """
        from cppmega.tree import accepted

        named = self.recipe.accepted_edits if self.recipe is not None else ()
        return accepted.merged(named, self.options.accept)

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """The pages whose declined calls Megatron's own code may compute in this launch."""
        named = self.recipe.allow_fallback if self.recipe is not None else ()
        return calls.allowed(self.environ, (*named, *self.options.allow_fallback))

    @property
    def adds_arguments(self) -> bool:
        """Whether the line is of a script that may have arguments and defaults of its own."""
        return self.recipe is None and (self.allows_unknown or bool(self.arguments_from))

    @property
    def is_loop(self) -> bool:
        """Whether the recipe runs in our own loop, without Megatron's parser."""
        return self.recipe is not None and self.recipe.kind == "loop"

    @cached_property
    def session(self) -> Session:
        """The tree and its catalogue."""
        return Session(self.root, self.catalogues)

    @cached_property
    def receipt(self) -> Receipt:
        """Record of what was applied; empty where nothing was."""
        return receipt.load(self.session.read_tree()).receipt

    @cached_property
    def plan(self) -> Plan:
        """Every page's state, with the gates of the last apply."""
        return self.session.plan(None, {**self.environ, **self.receipt.gates})

    @cached_property
    def wanted_patches(self) -> tuple[str, ...]:
        """Patches without which the recipe must not start; none where there is no recipe.

        Raises:
            CppmegaError: `page-failed`.
        """
        return wanted_patches(self.recipe, self.session.pages) if self.recipe is not None else ()

    @cached_property
    def memory(self) -> Estimate:
        """Memory of the recipe's fullest GPU; only defined where there is a recipe."""
        assert self.recipe is not None
        widened = provided(self.session.pages.values(), dsa_widths.TILELANG)
        attends = bool(provided(self.session.pages.values(), dsa_widths.ATTENTION))
        return estimate(self.recipe, widened, attends)

    @property
    def needs_gpu(self) -> bool:
        """Whether the recipe needs a GPU."""
        return self.recipe is not None and self.recipe.gpus > 0

    @cached_property
    def launch_line(self) -> LaunchLine:
        """The launch line.

        Raises:
            NotApplicable: nothing that Megatron parses is launched.
            CppmegaError: it cannot be rendered for the installed version.
        """
        if self.recipe is None:
            return LaunchLine.from_words(self.arguments, self.options, self.environ, self.world)
        version = self.session.read_tree().version
        return LaunchLine.from_recipe(self.recipe, self.options, self.arguments, version)

    @cached_property
    def process(self) -> RankAnswer:
        """The answer of a process that imports what the training processes will import.

        Raises:
            CppmegaError: `process-ended`, `process-hangs`.
        """
        try:
            line: LaunchLine | None = self.launch_line
        except (NotApplicable, CppmegaError):
            line = None  # Megatron parses nothing, or the line's own check refuses it
        order = RankOrder(
            root=str(self.root) if self.root is not None else None,
            expected=str(self.session.root),
            accepted=self.accepted,
            argv=line.argv if line is not None else None,
            world=line.world if line is not None else None,
            only_parses=self.only_parses,
            arguments_from=self.arguments_from,
            respells=self.recipe is None and self.allows_unknown,
        )
        environ = {**(line.environment if line is not None else {}), **self.environ}
        allocator.set_in(environ)  # as cppmega.run does: Megatron's validation reads it
        return ask("cppmega.preflight.workers.rank", order, RankAnswer, environ, here=True)

    @property
    def parsed_line(self) -> ParsedLine:
        """The launch line as the installed version's parser reads it.

        Raises:
            NotApplicable: nothing that Megatron parses is launched.
            CppmegaError: the line cannot be rendered for the installed version.
        """
        if not self.launch_line.argv:
            raise NotApplicable("the launch line has no words for Megatron")
        assert self.process.line is not None  # AFTER: imported_process found no problem
        return self.process.line

    @property
    def rank_environment(self) -> Mapping[str, str]:
        """The variables of the ranks: those of the launch, and what the recipe adds to them."""
        return {**self.launch_line.environment, **self.environ}

    @property
    def megatron_args(self) -> Namespace:
        """The launch line's arguments, as Megatron's own code has them, and its variables.

        `cppmega_variables` are the variables that patched code will find in a rank.

        Raises:
            NotApplicable: nothing that Megatron parses is launched.
        """
        environ = self.rank_environment.items()
        variables = {name: value for name, value in environ if name.startswith(env.PREFIX)}
        return Namespace(**self.parsed_line.args, cppmega_variables=variables)

    @property
    def run(self) -> Run:
        """The run as its rules see it.

        Raises:
            NotApplicable: nothing that Megatron parses is launched.
            CppmegaError: the checkpoint from which it resumes cannot be read.
        """
        args, line = self.megatron_args, self.launch_line
        load, saved = line.options.load, None
        if load is not None and checkpoint_tracker.exists(load):
            saved = checkpoint_files.shapes(load)
        return Run(
            args,
            args.cppmega_variables,
            saved=saved,
            recipe=self.recipe,
            words=line.flags,
            pages=self.provided,
            trainer=line.options,
        )

    @cached_property
    def provided(self) -> ProvidedBy:
        """What the pages in the code provide, and what the others would."""
        verdicts, pages = self.plan.verdicts, self.session.pages
        there = {name for name, verdict in verdicts.items() if verdict.state in IN_THE_CODE}
        present = tuple(page for name, page in pages.items() if name in there)
        return ProvidedBy(present, tuple(p for n, p in pages.items() if n not in there))

    @cached_property
    def allowance(self) -> Allowance:
        """How long the first reading of datasets may take; unlimited with `deep`."""
        return Allowance(None if self.deep else _SECONDS, console.say)

    @cached_property
    def data(self) -> DataTokens:
        """The data of a recipe that Megatron trains, checked and read within the allowance.

        Raises:
            NotApplicable: nothing that Megatron parses is launched.
            CppmegaError: what `data_requirements.check` raises.
        """
        options = self.launch_line.options
        assert self.recipe is not None
        return data_requirements.check(self.recipe, options, self.allowance.read)

    @cached_property
    def devices(self) -> Devices:
        """The GPUs of this machine as a training process would see them.

        Raises:
            NotApplicable: the launch needs no GPU.
            CppmegaError: `no-gpu`, or what asking a process raises.
        """
        if self.recipe is not None and not self.needs_gpu:
            raise NotApplicable(f"{self.recipe.name} runs on CPU")
        if self.recipe is None and not self.training_machine:
            raise NotApplicable("this machine has no GPU, and no recipe needs one")
        root = self.session.read_tree().root
        return devices.look(self.recipe, self.environ, root, has_gpu=self.training_machine)

    @property
    def gpus_here(self) -> int:
        """GPUs that the launch needs on this host."""
        assert self.recipe is not None
        return -(-self.recipe.gpus // self.nodes)


def gpu_here() -> bool:
    """Whether this machine has an NVIDIA driver with a device, without importing torch."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()
