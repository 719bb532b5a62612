"""Requirements that must hold before a training run may touch a GPU, checked without torch.

Each check stops with an error name of its own, so that a mistyped path is not discovered only after
the model has been built or, worse, never.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cppmega.checkpoints import files as checkpoint_files
from cppmega.checkpoints import tracker as checkpoint_tracker
from cppmega.errors import CppmegaError
from cppmega.host import allocator, command_words, env
from cppmega.host.wording import counted
from cppmega.overlay import receipt
from cppmega.overlay.verbs import Session
from cppmega.overlay.verdict import Verdict
from cppmega.overlay.wanted import wanted_patches
from cppmega.recipe import Recipe
from cppmega.recipe.render import Rendered
from cppmega.recipe.run_options import RunOptions
from cppmega.rules import RULES
from cppmega.rules.rule import Run, check
from cppmega.tree.installed import Tree


def check_tree(tree: Tree) -> None:
    """Check that the megatron to be imported has a training loop.

    Raises:
        CppmegaError: `training-not-in-wheel`.
    """
    if not (tree.root / "megatron" / "training" / "__init__.py").is_file():
        raise CppmegaError(
            "training-not-in-wheel",
            f"{tree.root} has megatron.core {tree.version} and no megatron.training.",
            "Wheels up to 0.16 ship only the library; the training loop is in the repository.",
            "pip install megatron-core==0.19.2, or a checkout of the same version on PYTHONPATH",
        )


def check_complete(recipe: Recipe, rendered: Rendered) -> None:
    """Check that the release has everything the recipe needs.

    Raises:
        CppmegaError: `recipe-not-complete`.
    """
    if rendered.missing:
        lacks = "; ".join(f"{gap.part}: {gap.reason}" for gap in rendered.missing)
        raise CppmegaError(
            "recipe-not-complete",
            f"Recipe {recipe.name} on megatron-core {rendered.version} lacks {lacks}.",
            "Another, smaller model would train under this model's name.",
            "cppmega recipes shows what each one lacks; train one that lacks nothing, or your own",
        )


IN_THE_CODE = ("applied", "armed", "upstreamed")
"""States that satisfy a recipe which needs a patch. `not-applicable` does not: the release lacks
the feature that the recipe relies on."""


def check_patches(recipe: Recipe, session: Session) -> str:
    """Check that the patches that the recipe needs are in the tree.

    Returns:
        The overlay digest, or `none`.

    Raises:
        CppmegaError: `patch-missing`.
    """
    applied = receipt.load(session.read_tree()).receipt
    verdicts = session.plan(None, {**os.environ, **applied.gates}).verdicts
    for name in wanted_patches(recipe, session.pages):
        if name not in verdicts or verdicts[name].state not in IN_THE_CODE:
            raise patch_missing(recipe, session, name, verdicts.get(name))
    return applied.digest or "none"


def patch_missing(
    recipe: Recipe, session: Session, name: str, verdict: Verdict | None
) -> CppmegaError:
    """The error for a patch that the recipe needs and the code does not have.

    Args:
        verdict: the verdict on it; None if no catalogue has a page of that name.
    """
    state: str = verdict.state if verdict is not None else "unknown"
    lacks = ""
    if verdict is not None and verdict.detail:
        state += f": {verdict.detail}"
    if name in session.pages:
        tree = session.read_tree()
        absent = [d for d in session.pages[name].patch.distributions if not tree.has(d)]
        lacks = f"install {', '.join(absent)} in {session.root}, then " if absent else ""
        if verdict is not None and verdict.state in ("unported", "not-applicable") and not absent:
            lacks = f"use a Megatron that it serves (cppmega explain {name}), or port it; then "
    return CppmegaError(
        "patch-missing",
        f"Recipe {recipe.name} needs the patch {name}; in {session.root} it is {state}.",
        "The run would stop later, or train something other than it claims.",
        f"{lacks}python -m cppmega.apply_patches{_how_to_ask(recipe, session, name)}",
    )


def _how_to_ask(recipe: Recipe, session: Session, name: str) -> str:
    """What a command must say to apply a page that is applied only where somebody asks for it."""
    page = session.pages.get(name)
    return f" --recipe {recipe.name}" if page is not None and page.only_where_asked else ""


def check_profile(recipe: Recipe, options: RunOptions) -> None:
    """Check that the steps to be profiled are among those of the run.

    Raises:
        CppmegaError: `profile-beyond-run`, `profiled-twice`.
    """
    if options.profile is None:
        return
    done, last = steps_of(recipe, options)
    needed = options.profile_after + options.profile
    if done + needed > last:
        raise CppmegaError(
            "profile-beyond-run",
            f"--profile {options.profile} --profile-after {options.profile_after} takes {needed} "
            f"steps; this run has {max(last - done, 0)}, from {done + 1} to {last}.",
            "It would end without a profile.",
            f"--set train_iters={done + needed}, another --exit-interval, or fewer steps",
        )
    if "--profile" in recipe.arguments:
        raise CppmegaError(
            "profiled-twice",
            "--profile is among Megatron's own arguments, too.",
            "Two profilers cannot record at the same time.",
            "leave one of the two out",
        )


def steps_of(recipe: Recipe, options: RunOptions) -> tuple[int, int]:
    """The number of steps already done at a start, and the step after which it ends."""
    loaded = options.load and checkpoint_tracker.newest_step(options.load)
    done, every = loaded or 0, options.exit_interval
    last = recipe.train_iters if every is None else (done // every + 1) * every
    return done, min(last, recipe.train_iters)


_OF_FIELDS = {
    env.DSA_INDEX_PATTERN.name: "dsa_index_pattern",
    env.NGRAM_HASH.name: "ngram_hash",
    env.STRUCTURE.name: "structure",
    env.MAMBA3.name: "mamba3",
    env.M2RNN.name: "m2rnn",
}
"""Variables that change a model, with the fields that set them."""


def check_gates(recipe: Recipe, environment: Mapping[str, str]) -> None:
    """Check that the switches are set that the recipe relies on, and that none contradicts it.

    Raises:
        CppmegaError: `gate-not-set`, `variable-differs`.
    """
    for name, wanted in recipe.wanted_gates:
        found = environment.get(name, "")
        if found != wanted:
            raise CppmegaError(
                "gate-not-set",
                f"Recipe {recipe.name} needs {name}={wanted}; the environment has {found!r}.",
                "The patch it switches is off, and the run is not the one the recipe describes.",
                f"export {name}={wanted}, then python -m cppmega.apply_patches",
            )
    for name, wanted in recipe.variables:
        if environment.get(name, wanted) != wanted:
            raise CppmegaError(
                "variable-differs",
                f"Recipe {recipe.name} means {name}={wanted}; the environment has "
                f"{environment[name]!r}.",
                "The run would follow the environment, and be recorded with the recipe.",
                f"unset {name}, or change the recipe's field with --set",
            )
    meant = dict(recipe.variables)
    for variable, field in _OF_FIELDS.items():
        found = environment.get(variable, "").strip()
        if found and variable not in meant:
            raise CppmegaError(
                "variable-differs",
                f"{variable}={found} is set, and recipe {recipe.name} has no {field}.",
                "The run would follow the environment, and be recorded with the recipe.",
                f"unset {variable}, or --set {field}=...",
            )


def check_world(recipe: Recipe, environment: Mapping[str, str]) -> None:
    """Check that there are as many processes as the recipe has GPUs.

    Raises:
        CppmegaError: `wrong-world-size`.
    """
    world = int(environment.get("WORLD_SIZE", "1"))
    if world != recipe.gpus:
        raise CppmegaError(
            "wrong-world-size",
            f"Recipe {recipe.name} takes {counted(recipe.gpus, 'GPU')}; the launch has "
            f"{counted(world, 'process', 'processes')}.",
            "A different number of replicas means another batch and another layout.",
            f"torchrun --nproc_per_node {recipe.gpus} -m cppmega.run -m cppmega.trainer "
            f"{recipe.name} ..., or --set gpus={world} with a batch that fits",
        )


def check_packages(recipe: Recipe, options: RunOptions) -> None:
    """Check that the packages are installed that the run will import late.

    Raises:
        CppmegaError: `package-missing`.
    """
    needed = {"transformer_engine": ("the layers of every recipe for GPUs", "")}
    if recipe.uses_tilelang:
        needed["tilelang"] = ("the recipe's DSA kernels", "--set dsa_kernel_backend=none")
    if recipe.uses_mamba_ssm:
        needed["mamba_ssm"] = ("the recipe's Mamba-3 layers", "")
    if recipe.uses_mimo:
        needed["tilelang"] = ("the recipe's Mamba-3 layers", "")
    if options.tensorboard is not None:
        needed["tensorboard"] = ("--tensorboard", "leave --tensorboard out")
    if options.wandb_project:
        needed["wandb"] = ("--wandb-project", "leave --wandb-project out")
    for package, (purpose, otherwise) in needed.items():
        if importlib.util.find_spec(package) is None:
            raise CppmegaError(
                "package-missing",
                f"The package {package} is not installed; it is needed for {purpose}.",
                "Megatron would stop after the start, or print a warning and log nothing.",
                f"pip install {package.replace('_', '-')}"
                + (f", or {otherwise}" * bool(otherwise)),
            )


def check_checkpoint(load: Path | None) -> None:
    """Check that there is a complete checkpoint where the run is to resume.

    Raises:
        CppmegaError: `no-checkpoint`, `checkpoint-broken`.
    """
    if load is not None:
        checkpoint_files.newest(load)


def set_environment(variables: Sequence[tuple[str, str]]) -> None:
    """Set the variables that the run relies on, unless the user has; before torch is imported.

    A process that no launcher started is a world of one.
    """
    if "RANK" not in os.environ:
        single = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        os.environ.update(single)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        # The store's server picks any free port; one chosen here might be in use by then.
        os.environ.setdefault("MASTER_PORT", "0")
    for name, value in variables:
        os.environ.setdefault(name, value)
    allocator.set_in(os.environ)  # for a start without cppmega.run


def check_arguments(recipe: Recipe, options: RunOptions, args: Any) -> None:
    """Check the parsed arguments, in which a run may have claimed something that it did not do.

    Raises:
        CppmegaError: the first of `cppmega.rules` that is broken.
    """
    words = {option.name for option in command_words.read(sys.argv)}
    check(RULES, Run(args, os.environ, recipe=recipe, words=words, trainer=options))
