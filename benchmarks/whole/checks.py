"""What `whole_training.py` refuses before it starts a process.

Its ranks would refuse the same, or end without a result, after minutes of start-up or of training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks.slices.report import WARM
from cppmega.errors import CppmegaError
from cppmega.host.wording import counted
from cppmega.overlay.verbs import Session
from cppmega.recipe import Recipe
from cppmega.recipe import index as recipes_index
from cppmega.recipe.run_options import RunOptions
from cppmega.training import plan, requirements

PROFILED = 2
"""Steps of the profile."""
PROFILE_AFTER = 40
"""Step before the profile, where the caller names none."""


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Let an error of cppmega end the command with its text instead of a traceback.

    Raises:
        ClickException: what the error says.
    """
    try:
        yield
    except CppmegaError as error:
        raise click.ClickException(error.render().removeprefix("error: ")) from None


@dataclass(frozen=True, kw_only=True)
class Course:
    """The steps after which a run is saved, profiled and killed."""

    save_after: int
    kill_after: int
    profile_after: int | None
    """None: nothing is profiled."""


def course(
    recipe: Recipe, save_after: int, kill_after: int, profile_after: int | None, reloaded: int
) -> Course:
    """The course of a run that can give a result.

    Args:
        recipe: the run.
        save_after: the step of the checkpoint.
        kill_after: the step before the kill.
        profile_after: the step before the profile, if the caller names one.
        reloaded: steps that another recipe trains after the checkpoint; 0: none.

    Raises:
        UsageError: it could only fail.
    """
    _refuse(
        save_after >= kill_after,
        f"--save-after {save_after} must be below --kill-after {kill_after}: there would be no "
        "checkpoint to resume from, or no step to train twice.",
    )
    _refuse(
        kill_after >= 2 * save_after,
        f"--kill-after {kill_after} must be below twice --save-after {save_after}: the run saves "
        "at each multiple, and would resume from another checkpoint.",
    )
    _refuse(
        kill_after >= recipe.train_iters,
        f"--kill-after {kill_after} must be below train_iters={recipe.train_iters}: the run would "
        f"end before it is killed. --set train_iters=N makes it longer.",
    )
    _refuse(
        bool(reloaded) and save_after + reloaded > recipe.train_iters,
        f"--reload-steps {reloaded} after --save-after {save_after} are more than "
        f"train_iters={recipe.train_iters}: the run would have no losses to compare.",
    )
    found = Course(
        save_after=save_after,
        kill_after=kill_after,
        profile_after=_profile_after(profile_after, kill_after),
    )
    # The profiler disturbs the step before its own, too.
    disturbed = 0 if found.profile_after is None else PROFILED + 1
    _refuse(
        recipe.train_iters <= WARM + disturbed,
        f"train_iters={recipe.train_iters} leaves no step to measure: {WARM} warm up, and the "
        f"profile disturbs {disturbed}.",
    )
    return found


def _profile_after(named: int | None, kill_after: int) -> int | None:
    """The step before the profile, which has to end before the kill; None: it would not."""
    after = PROFILE_AFTER if named is None else named
    fits = after + PROFILED <= kill_after
    _refuse(
        named is not None and not fits,
        f"--profile-after {after} must be at most {kill_after - PROFILED}: the profile takes "
        f"{PROFILED} steps, and the run is killed after step {kill_after}.",
    )
    return after if fits else None


def _refuse(wrong: bool, why: str) -> None:
    if wrong:
        raise click.UsageError(why)


def shipped(name: str, changes: tuple[str, ...]) -> Recipe:
    """A shipped recipe, changed.

    Raises:
        UsageError: it is a file of the caller's; the ranks and the page know only the name.
        CppmegaError: there is none of that name, or the changes do not fit.
    """
    _refuse(name.endswith(".py"), f"{name} is a file, and only shipped recipes are measured.")
    return recipes_index.with_text(recipes_index.load(name), changes)


def check_layouts(saving: Recipe, loading: Recipe) -> None:
    """Check that one recipe's checkpoint has a format that the other can load.

    Raises:
        UsageError: it has the optimizer's states by bucket, which are cut otherwise in another
            layout; only the number of replicas may differ.
    """
    by_bucket = saving.use_distributed_optimizer and not saving.dist_ckpt_optim_fully_reshardable
    _refuse(
        by_bucket and _layout(saving) != _layout(loading),
        f"{loading.name} has another layout than {saving.name} and cannot load its checkpoint. "
        "--set dist_ckpt_optim_fully_reshardable=True saves one for every layout.",
    )


def _layout(recipe: Recipe) -> tuple[int, ...]:
    return (
        recipe.tensor_model_parallel_size,
        recipe.pipeline_model_parallel_size,
        recipe.virtual_pipeline_model_parallel_size,
        recipe.expert_model_parallel_size,
    )


def check_start(recipe: Recipe, options: RunOptions, site: Path) -> None:
    """Check one start as its ranks will, by everything that files can show.

    Raises:
        CppmegaError: what the trainer would raise.
    """
    requirements.check_profile(recipe, options)
    plan.check_files(recipe, options, Session(site))


def check_gpus(recipe: Recipe) -> None:
    """Check that this host has enough GPUs for a recipe.

    Raises:
        ClickException: it has not.
    """
    import torch

    found = torch.cuda.device_count()
    if recipe.gpus > found:
        raise click.ClickException(
            f"Recipe {recipe.name} takes {counted(recipe.gpus, 'GPU')}, and this host has {found}."
        )
