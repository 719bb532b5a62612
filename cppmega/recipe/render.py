"""Render a recipe as the command line of an installed Megatron version.

Names that changed between releases are in one table, which the tests compare with each release's
own parser. What a release cannot express is left out of the line and listed in `missing`: such a
line can be shown, but the trainer refuses to start it.
"""

from __future__ import annotations

from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from cppmega.errors import CppmegaError
from cppmega.recipe import Recipe
from cppmega.recipe import layer_pattern as patterns
from cppmega.recipe.arguments import arguments
from cppmega.recipe.run_options import RunOptions

OLDEST = (0, 17)
"""First release line whose wheel has `megatron.training`."""

_RENAMED: dict[str, tuple[tuple[tuple[int, int], str], ...]] = {
    "--cuda-graph-modules": (((0, 17), "--cuda-graph-scope"), ((0, 18), "--cuda-graph-modules")),
    "--null-tokenizer-eod-id": (((0, 17), ""), ((0, 18), "--null-tokenizer-eod-id")),
    "--dsa-kernel-backend": (((0, 17), ""), ((0, 19), "--dsa-kernel-backend")),
}
"""Newest name -> the names since each release line; empty where a release has no such argument."""


@dataclass(frozen=True, slots=True)
class Missing:
    """Something that the recipe needs and the installed release lacks."""

    part: str
    reason: str


@dataclass(frozen=True, slots=True)
class Rendered:
    """A launch line, and what it leaves out."""

    version: str
    argv: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    missing: tuple[Missing, ...]


def release_line(version: str) -> tuple[int, int]:
    """(0, 19) of 0.19.2.

    Raises:
        CppmegaError: `version-unknown`, `training-not-in-wheel`.
    """
    try:
        parsed = Version(version)
    except InvalidVersion:
        raise CppmegaError(
            "version-unknown",
            f"{version!r} is not a version of megatron-core.",
            "The names of its arguments depend on it.",
            "cppmega status shows the installed version",
        ) from None
    line = (parsed.major, parsed.minor)
    if line < OLDEST:
        raise CppmegaError(
            "training-not-in-wheel",
            f"megatron-core {version} only ships megatron.core: its training loop is in the "
            "git repository.",
            "The trainer needs megatron.training, which wheels contain since 0.17.",
            "pip install megatron-core==0.19.2, or train with the pretrain script of a checkout "
            f"of core_v{version} (put the checkout first on PYTHONPATH and patch it too)",
        )
    return line


def render(
    recipe: Recipe,
    version: str,
    options: RunOptions | None = None,
    eod: int | None = None,
    further: tuple[str, ...] = (),
) -> Rendered:
    """The arguments for Megatron's parser.

    Args:
        recipe: the run.
        version: of the installed megatron-core.
        options: of this start; None: the defaults.
        eod: id of the token that ends a document, where the data states it.
        further: arguments after the recipe's own, which no rule has been asked about.

    Raises:
        CppmegaError: `recipe-is-a-loop`, `version-unknown`, `training-not-in-wheel`.
    """
    if recipe.kind == "loop":
        raise CppmegaError(
            "recipe-is-a-loop",
            f"Recipe {recipe.name} runs in its own loop, not in Megatron's pretrain.",
            "Megatron's training loop and optimizer require CUDA.",
            "cppmega recipes shows what can be rendered",
        )
    line = release_line(version)
    options = options or RunOptions()
    words: list[str] = []
    for name, values in arguments(recipe, line, options, eod):
        name = _name(name, line)
        if name and len(values) == 1 and values[0].startswith("-"):
            words.append(f"{name}={values[0]}")  # a pattern may begin with -, the letter of an MLP
        elif name:
            words += [name, *values]
    for argument in (*recipe.arguments, *further):
        words.append(_name(argument, line) or argument)
    environment = (*recipe.variables, *recipe.environment)
    if max(recipe.tensor_model_parallel_size, recipe.context_parallel_size) > 1:
        # Before Blackwell, Megatron requires it to order communication before computation.
        environment = (("CUDA_DEVICE_MAX_CONNECTIONS", "1"), *environment)
    return Rendered(version, tuple(words), environment, missing(recipe, version))


def missing(recipe: Recipe, version: str) -> tuple[Missing, ...]:
    """The features that the recipe needs and the release lacks; empty if it can be trained."""
    line = release_line(version)
    lacking: list[Missing] = []
    if recipe.kind == "hybrid":
        for letter in recipe.unknown_to(line):
            since = patterns.since(letter)
            reason = (
                f"cppmega adds it to megatron-core {since}, and not to {version}"
                if letter in patterns.OWN
                else f"megatron-core {version} has no layer for it; {since} is the first that does"
            )
            layers = recipe.layout.counts()[letter]
            part = f"{layers} layers {letter} ({patterns.LETTERS[letter]})"
            lacking.append(Missing(part, reason))
    for name, part in (
        ("ngram_hash", "n-gram hash embedding"),
        ("structure", "structure embedding"),
    ):
        if getattr(recipe, name) is not None and line < (0, 19):
            reason = f"cppmega adds it to megatron-core 0.19.2, and not to {version}"
            lacking.append(Missing(part, reason))
    if recipe.kind == "gpt" and recipe.uses_dsa and line < (0, 18):
        reason = f"megatron-core {version} accepts the argument, but its builder then fails"
        lacking.append(Missing("DSA in a GPT", reason))
    if recipe.uses_dsa and recipe.dsa_kernel_backend not in (None, "none") and line < (0, 19):
        reason = f"megatron-core {version} has no DSA kernels; 0.19 is the first that does"
        lacking.append(Missing(f"DSA kernel backend {recipe.dsa_kernel_backend}", reason))
    if recipe.uses_mhc and line < (0, 19):
        reason = f"cppmega adds them to 0.19; megatron-core {version} has no such option"
        lacking.append(Missing("hyper-connections (mHC)", reason))
    return tuple(lacking)


def _name(name: str, line: tuple[int, int]) -> str:
    """That release's name of an argument; empty where it has none."""
    spelled = name
    for since, then in _RENAMED.get(name, ()):
        if line >= since:
            spelled = then
    return spelled
