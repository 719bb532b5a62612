"""The plan of a training run: everything that can be checked before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from cppmega import calls, guard
from cppmega.catalogue import gates
from cppmega.checkpoints import files as checkpoint_files
from cppmega.errors import CppmegaError
from cppmega.guard import files
from cppmega.overlay.verbs import Session
from cppmega.overlay.wanted import wanted_patches
from cppmega.recipe import Recipe
from cppmega.recipe.render import Rendered, render
from cppmega.recipe.run_options import RunOptions
from cppmega.training import data_requirements, requirements
from cppmega.training.batch import DataTokens
from cppmega.training.requirements import Start
from cppmega.tree import accepted


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """A run that is consistent with everything on disk."""

    recipe: Recipe
    options: RunOptions
    rendered: Rendered
    data: DataTokens
    session: Session
    overlay: str
    """Digest of what is applied; empty until `check_machine`."""


def open_session(root: Path | None) -> Session:
    """The tree that this process imports megatron from.

    Raises:
        CppmegaError: `two-roots`.
    """
    active = guard.active()
    if active is not None:  # cppmega.run has chosen it already, and armed its patches
        chosen = active.session.read_tree().root
        if root is not None and root.resolve() != chosen.resolve():
            raise CppmegaError(
                "two-roots",
                f"cppmega.run imports megatron from {chosen}, --megatron names {root}.",
                "The tree that was checked would not be the one that trains.",
                f"python -m cppmega.run --megatron {root} -m cppmega.trainer ...",
            )
        return active.session
    session = Session(root)
    if root is not None:
        files.only_from(root)
    return session


def check_files(recipe: Recipe, options: RunOptions, session: Session) -> TrainingPlan:
    """Check recipe, data and checkpoint. Imports no torch and takes no GPU memory.

    Raises:
        CppmegaError: one named reason for each thing that is not as it must be.
    """
    if recipe.kind == "loop":
        raise CppmegaError(
            "recipe-is-a-loop",
            f"Recipe {recipe.name} runs in cppmega's loop on CPU, not in Megatron's pretrain.",
            "Megatron's training loop and optimizer require CUDA.",
            "cppmega recipes lists the loops that run on CPU",
        )
    gates.check(session.pages.values())
    version = session.read_tree().version
    Start(recipe, options, session).check("completeness", "variables")
    data = data_requirements.check(recipe, options)
    if options.load is not None:
        checkpoint_files.newest(options.load)
    return TrainingPlan(
        recipe=recipe,
        options=options,
        rendered=render(recipe, version, options, data.eod),
        data=data,
        session=session,
        overlay="",
    )


def check_machine(plan: TrainingPlan) -> TrainingPlan:
    """Check the installation, and set the environment. Imports no torch either.

    Raises:
        CppmegaError: one named reason for each thing that is not as it must be.
    """
    start = Start(plan.recipe, plan.options, plan.session)
    start.check("the tree")
    digest = requirements.check_patches(plan.recipe, plan.session)
    start.check("packages", "ranks")
    requirements.set_environment(plan.rendered.environment)
    active = guard.active()
    if active is not None:
        digest = active.receipt.digest
        active.wanted = frozenset(wanted_patches(plan.recipe, plan.session.pages))
    edits, fallbacks = accepted.in_this_process(), calls.allowed()
    return replace(plan, overlay=accepted.name_of_code(digest, edits, fallbacks))
