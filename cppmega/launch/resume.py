"""The launch of an earlier run, taken over by the launch that resumes from it.

What the new command names itself replaces what the earlier one had, and is reported.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from cppmega.errors import CppmegaError
from cppmega.host import command_words, console, env, redact
from cppmega.host.command_words import Option
from cppmega.launch import record as launch_record
from cppmega.launch.request import LaunchRequest
from cppmega.recipe import Recipe
from cppmega.recipe import index as recipes_index
from cppmega.recipe.run_options import RunOptions
from cppmega.runs import folder as run_folder
from cppmega.runs.folder import Run
from cppmega.training import options as trainer_options

_SHAPE = (
    *("hidden_size", "ffn_hidden_size", "num_layers", "mtp_num_layers", "pattern"),
    *("num_attention_heads", "num_query_groups", "kv_channels", "num_experts"),
    *("padded_vocab_size", "tied_embeddings"),
)
"""Fields of a recipe that decide the shapes of the weights in a checkpoint."""


_OF_THE_EARLIER_RUN = {"load", "metrics", "profile", "profile_after", "profile_folder"}
"""Options that are not taken over: where that run began, and the records that it left."""
_MERGED = {"changes", "accept"}
"""Options of `name=value` words, each of which is replaced by name."""
_OF_DATA = {"data", "mock_data", "tokenizer", "eod", "held_out", "data_cache"}

_TRAINER = "cppmega.trainer"
_FAMILIES = (env.PREFIX, "NVTE_", "MEGATRON_")
_LISTED = {
    *("CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_MAX_CONNECTIONS", "NVIDIA_TF32_OVERRIDE"),
    *("NCCL_ALGO", "NCCL_PROTO"),
}
"""Variables, and families of them, that decide what is computed. Others describe a machine."""
_OF_ONE_SHELL = {*env.OF_ONE_RUN, env.RUNS.name, env.CACHE.name}


@dataclass(frozen=True, slots=True)
class Earlier:
    """The launch of the run that is resumed, as its manifest states it."""

    run: Run
    options: RunOptions
    arguments: tuple[str, ...]
    """Megatron's own arguments, after `--`."""
    environment: Mapping[str, str]
    """The variables that decide what is computed, without those that the recipe set."""
    recipe: Recipe | None
    """The recipe that it kept, with its changes; None: this release cannot load it."""

    @property
    def is_script(self) -> bool:
        """Whether it is a run of a script."""
        return _is_script(self.run.outline.torchrun)

    @property
    def recipe_file(self) -> Path:
        """Its copy of the recipe, or the script, which may import what is beside it."""
        if self.is_script:
            return Path(self.run.outline.recipe.path)
        return self.run.path / "recipe" / f"{self.run.outline.recipe.name}.py"


def _is_script(words: Sequence[str]) -> bool:
    return "cppmega.run" in words and _TRAINER not in words


def earlier(run: Run) -> Earlier:
    """Read the launch of a run.

    Raises:
        CppmegaError: `run-damaged`.
    """
    manifest, name = run.manifest, run.outline.recipe.name
    line = manifest.torchrun
    arguments, recipe = manifest.arguments, None
    if _TRAINER in line:  # -m cppmega.trainer RECIPE, then they
        _, arguments = trainer_options.read(line[line.index(_TRAINER) + 2 :])
    if not _is_script(line):  # whose ranks run it, and nobody else
        try:
            kept = recipes_index.load(str(run.path / "recipe" / f"{name}.py"))
            recipe = recipes_index.with_text(kept, manifest.recipe.changes)
        except CppmegaError:  # an older release's, whose checkpoint is compared later
            pass
    by_recipe = recipe.environment if recipe is not None else ()
    environment = {
        name: value
        for name, value in manifest.environment.items()
        if (name.startswith(_FAMILIES) or name in _LISTED)
        and name not in _OF_ONE_SHELL
        and (name, value) not in by_recipe
    }
    options = replace(manifest.options, changes=manifest.recipe.changes)
    if options.save is not None and options.save.parent.name == (manifest.name or run.name):
        options = replace(options, save=None)  # its own folder
    return Earlier(run, options, arguments, environment, recipe)


def continued(request: LaunchRequest, old: Earlier) -> LaunchRequest:
    """The request, with everything that the earlier launch stated and this one does not.

    Raises:
        CppmegaError: `value-not-recorded`.
    """
    options, before = request.options, old.options
    given = {
        field.name
        for field in fields(options)
        if field.name in request.given or getattr(options, field.name) != field.default
    }
    if "mock_data" in given:
        given |= _OF_DATA
    elif "data" in given:  # the old ones' card named it, or the command line did
        given |= {"mock_data", "tokenizer", "eod"}
    kept: dict[str, Any] = {
        field.name: getattr(before, field.name)
        for field in fields(options)
        if field.name not in given | _OF_THE_EARLIER_RUN
    }
    for name in _MERGED:
        words = (*getattr(before, name), *getattr(options, name))
        kept[name] = tuple({word.partition("=")[0]: word for word in words}.values())
    groups = {**_by_name(old.arguments), **_by_name(request.arguments)}.values()
    arguments = tuple(word for group in groups for option in group for word in option.words)
    options = replace(options, **kept)
    variables = (value for name, value in old.environment.items() if name not in os.environ)
    for word in (*options.words(), *arguments, *variables):
        if redact.HIDDEN in word:
            raise CppmegaError(
                "value-not-recorded",
                f"The launch of {old.run.name} has a value that its manifest does not hold, as "
                f"it looked like a credential: {word}.",
                "A run without it would not be the same.",
                "give the option, argument or variable again",
            )
    nproc = request.nproc
    manifest = old.run.manifest
    states_no_gpus = old.is_script or (old.recipe is not None and old.recipe.gpus == 0)
    if nproc is None and states_no_gpus:
        nproc = manifest.nproc * manifest.nodes // request.nodes or None
    return replace(
        request,
        recipe=request.recipe or str(old.recipe_file),
        options=options,
        arguments=arguments,
        nproc=nproc,
    )


def check(name: str, recipe: Recipe | None, old: Earlier) -> None:
    """Check that a run can be resumed, and with this recipe or script.

    Raises:
        CppmegaError: `checkpoint-of-another-recipe`, `checkpoint-of-another-model`,
            `run-still-running`, `nothing-to-do`.
    """
    run = old.run
    if name != run.outline.recipe.name:
        raise CppmegaError(
            "checkpoint-of-another-recipe",
            f"{run.name} is a run of {run.outline.recipe.name}, not of {name}.",
            "Its checkpoint is another model's, or the record of it would be another recipe's.",
            f"cppmega launch --resume {run.word}",
        )
    if recipe is not None:
        _refuse_other_model(recipe, old)
    if run.state() in run_folder.LIVE:
        raise CppmegaError(
            "run-still-running",
            f"{run.name} is {run.state()}.",
            "Two runs would continue from one checkpoint while it is still being written.",
            f"cppmega stop {run.word}",
        )
    if run.checkpoint() is None:
        origin = run.outline.resumes
        raise CppmegaError(
            "nothing-to-do",
            f"{run.name} ({run.state()}) has no complete checkpoint in {run.checkpoints}.",
            "A fresh start would be recorded as a resumed run.",
            f"--resume {origin}, which it had resumed"
            if origin
            else "launch without --resume for a fresh start",
        )


def report(
    request: LaunchRequest, recipe: Recipe | None, old: Earlier, environ: Mapping[str, str]
) -> None:
    """Say what was taken over, and what this launch has instead."""
    before = _stated(old.options, old.arguments, old.environment)
    now = _stated(
        request.options,
        request.arguments,
        {name: value for name, value in environ.items() if name in old.environment},
    )
    if old.recipe is not None and recipe is not None:
        for field in fields(recipe):
            values = getattr(old.recipe, field.name), getattr(recipe, field.name)
            if values[0] != values[1]:
                key = f"--set {field.name}"
                before[key], now[key] = (str(value) for value in values)
    name = old.run.name
    if old.is_script:
        kept = old.run.outline.recipe.sha256
        if launch_record.source_file(Path(request.recipe)).sha256 != kept:
            console.say(f"  {request.recipe} has changed since {name}, which keeps a copy of it")
    console.say(f"resuming from step {old.run.checkpoint()} of {name}")
    if same := [_spelled(key, value) for key, value in before.items() if now.get(key) == value]:
        console.say(f"  taken over from {name}: {' '.join(same)}")
    for key in dict.fromkeys((*before, *now)):
        if before.get(key) != now.get(key):
            mine, theirs = (
                _spelled(key, table[key]) if key in table else f"no {key}"
                for table in (now, before)
            )
            console.say(f"  {mine}; {name} had {theirs}")


def _spelled(key: str, value: str) -> str:
    joined = "=" if key.startswith("--set ") or not key.startswith("-") else " "
    return f"{key}{joined}{value}" if value else key


def _stated(
    options: RunOptions, arguments: Sequence[str], environment: Mapping[str, str]
) -> dict[str, str]:
    """What a launch states: option, argument or variable -> value, as a command line has it."""
    table = {
        f"--set {name}": value
        for name, _, value in (text.partition("=") for text in options.changes)
    }
    words = options.words(without={"changes", *_OF_THE_EARLIER_RUN})
    for prefix, line in (("", words), ("-- ", arguments)):
        for name, group in _by_name(line).items():
            table[prefix + name] = shlex.join(value for option in group for value in option.values)
    return {**table, **environment}


def _by_name(words: Sequence[str]) -> dict[str, list[Option]]:
    """The options of a command line by name; one that recurs keeps all its values."""
    groups: dict[str, list[Option]] = {}
    for option in command_words.read(words):
        groups.setdefault(option.name, []).append(option)
    return groups


def _refuse_other_model(recipe: Recipe, old: Earlier) -> None:
    """Compare with the recipe that the old run kept: not every checkpoint names its model."""
    then = old.recipe
    if then is None:
        return
    # A loop learns a vector for every position.
    shape = (*_SHAPE, "seq_length") if recipe.kind == "loop" else _SHAPE
    differences = [
        f"{name} {getattr(then, name)} and {getattr(recipe, name)}"
        for name in shape
        if getattr(then, name) != getattr(recipe, name)
    ]
    if differences:
        raise CppmegaError(
            "checkpoint-of-another-model",
            f"{old.run.name} and this launch differ: {', '.join(differences)}.",
            "The weights of its checkpoint do not fit.",
            f"cppmega launch --resume {old.run.word}, with the recipe that it kept and its --set",
        )
