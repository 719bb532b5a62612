"""The settings that a launch takes over from the run that it resumes."""

from __future__ import annotations

from dataclasses import replace

from cppmega.errors import CppmegaError
from cppmega.host import console
from cppmega.recipe import Recipe
from cppmega.recipe import index as recipes_index
from cppmega.recipe.run_options import RunOptions
from cppmega.runs import folder as run_folder
from cppmega.runs.folder import Run

_SHAPE = (
    *("hidden_size", "ffn_hidden_size", "num_layers", "mtp_num_layers", "pattern"),
    *("num_attention_heads", "num_query_groups", "kv_channels", "num_experts"),
    *("padded_vocab_size", "tied_embeddings"),
)
"""Fields of a recipe that decide the shapes of the weights in a checkpoint."""


def resumed_options(options: RunOptions, recipe: Recipe, old: Run) -> RunOptions:
    """The options, with checkpoint and data of an earlier run unless they name their own.

    Raises:
        CppmegaError: `run-damaged`, `run-of-another-recipe`, `run-of-another-model`,
            `run-still-running`, `nothing-to-resume`.
    """
    before = old.manifest.options
    _refuse_other_recipe(recipe, old)
    _refuse_other_model(recipe, old)
    if old.state() in run_folder.LIVE:
        raise CppmegaError(
            "run-still-running",
            f"{old.name} is {old.state()}.",
            "Two runs would continue from one checkpoint while it is still being written.",
            f"cppmega stop {old.word}",
        )
    step = old.checkpoint()
    if step is None:
        raise _nothing_to_resume(old)
    console.say(f"resuming from step {step} of {old.name}")
    options = replace(options, load=options.load or old.checkpoints)
    if options.data or options.mock_data:
        return options
    return replace(
        options,
        data=before.data,
        held_out=options.held_out or before.held_out,
        tokenizer=options.tokenizer or before.tokenizer,
        eod=options.eod or before.eod,
        mock_data=before.mock_data,
        data_cache=options.data_cache or before.data_cache,
    )


def _nothing_to_resume(old: Run) -> CppmegaError:
    origin = old.outline.resumes
    return CppmegaError(
        "nothing-to-resume",
        f"{old.name} ({old.state()}) has no complete checkpoint in {old.checkpoints}.",
        "A fresh start would be recorded as a resumed run.",
        f"--resume {origin}, which it had resumed"
        if origin
        else "launch without --resume for a fresh start",
    )


def _refuse_other_recipe(recipe: Recipe, old: Run) -> None:
    name = old.outline.recipe.name
    if name != recipe.name:
        raise CppmegaError(
            "run-of-another-recipe",
            f"{old.name} is a run of recipe {name}, not of {recipe.name}.",
            "Its checkpoint is another model's, or the record of it would be another recipe's.",
            f"cppmega launch {name} --resume {old.word}",
        )


def _refuse_other_model(recipe: Recipe, old: Run) -> None:
    """Compare with the recipe that the old run kept: not every checkpoint names its model."""
    kept, changes = old.path / "recipe" / f"{recipe.name}.py", old.outline.recipe.changes
    try:
        then = recipes_index.with_text(recipes_index.load(str(kept)), changes)
    except CppmegaError:
        return  # an older release's recipe: the checkpoint's own check compares what it can
    # A loop learns a vector for every position.
    shape = (*_SHAPE, "seq_length") if recipe.kind == "loop" else _SHAPE
    differences = [
        f"{name} {getattr(then, name)} and {getattr(recipe, name)}"
        for name in shape
        if getattr(then, name) != getattr(recipe, name)
    ]
    if differences:
        raise CppmegaError(
            "run-of-another-model",
            f"{old.name} and this launch differ: {', '.join(differences)}.",
            "The weights of its checkpoint do not fit.",
            "the --set with which it was launched: "
            + (" ".join(f"--set {text}" for text in changes) or "none"),
        )
