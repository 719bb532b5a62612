"""Recipes of kind `loop`, which train on CPU: what they support, and the loop that ships for them.

Megatron's `pretrain` and its optimizer require CUDA. `examples/smoke` is a loop of one's own on
megatron-core under `guard.steps`; it builds its corpus itself.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from cppmega.errors import CppmegaError
from cppmega.host import env, load_file, paths
from cppmega.recipe import Recipe
from cppmega.recipe.run_options import RunOptions
from cppmega.training.requirements import Start


def train(recipe: Recipe, options: RunOptions) -> None:
    """Train a loop recipe with the options of the trainer's command line.

    Raises:
        CppmegaError: `not-supported`, `wrong-world-size`, `already-trained`,
            `first-loss-implausible`, `step-not-finite`.
    """
    Start(recipe, options).check("loops")
    _module("loop").train(recipe, options, folder_of(options.data))


def fingerprint(folder: Path) -> str:
    """The fingerprint of the corpus in a folder, or of the one that would be built there."""
    return str(_module("corpus").fingerprint(folder))


def _module(name: str) -> Any:
    load_file.package("cppmega_examples", paths.shipped("examples"))
    return importlib.import_module(f"cppmega_examples.smoke.{name}")


def recipe_of_rank(recipe: Recipe, world: int) -> Recipe:
    """The recipe with one rank's share of the global batch, which is the same for any world size.

    Raises:
        CppmegaError: `wrong-world-size`.
    """
    share, rest = divmod(recipe.global_batch_size, world)
    if rest or not share:
        raise CppmegaError(
            "wrong-world-size",
            f"A global batch of {recipe.global_batch_size} cannot be divided among {world} ranks.",
            "Another batch size would be another run.",
            f"--nproc with a divisor of {recipe.global_batch_size}",
        )
    return recipe.with_(micro_batch_size=share, global_batch_size=share)


def folder_of(data: tuple[str, ...]) -> Path:
    """The folder of the loop's dataset, which it builds from the corpus that ships with it."""
    return Path(data[0]) if data else env.RUNS.read() / "smoke_data"
