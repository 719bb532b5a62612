"""What a launch takes from the run that it goes on from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cppmega.errors import CppmegaError
from cppmega.host import console
from cppmega.launch.folder import Launch
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
"""Of a recipe: what the weights in a checkpoint have the shapes of."""


def options(asked: Launch, recipe: Recipe, old: Run) -> RunOptions:
    """The options asked for, with checkpoint and data of an earlier run where they name none.

    Raises:
        CppmegaError: `run-damaged`, `run-of-another-recipe`, `run-of-another-model`,
            `run-still-running`, `nothing-to-resume`.
    """
    old.require_whole()
    whose = old.manifest["recipe"].get("name")
    if whose != recipe.name:
        raise CppmegaError(
            "run-of-another-recipe",
            f"{old.name} is a run of recipe {whose}, not of {recipe.name}.",
            "Its checkpoint is another model's, or the record of it would be another recipe's.",
            f"cppmega launch {whose} --resume {old.word}",
        )
    _refuse_other_model(recipe, old)
    if old.state() in run_folder.LIVE:
        raise CppmegaError(
            "run-still-running",
            f"{old.name} is {old.state()}.",
            "Two runs would go on from one checkpoint while it is still being made.",
            f"cppmega stop {old.word}",
        )
    step = old.checkpoint()
    if step is None:
        origin = old.manifest.get("resumes")
        raise CppmegaError(
            "nothing-to-resume",
            f"{old.name} ({old.state()}) has no whole checkpoint in {old.checkpoints}.",
            "A fresh start under the name of a resumed run would pass for one.",
            f"--resume {origin}, from which it went on"
            if origin
            else "launch without --resume for a fresh start",
        )
    console.say(f"going on from step {step} of {old.name}")
    given, before = asked.options, old.manifest["options"]
    given = replace(given, load=given.load or old.checkpoints)
    if given.data or given.mock_data:
        return given
    return replace(
        given,
        data=tuple(before["data"]),
        tokenizer=given.tokenizer or before["tokenizer"],
        eod=given.eod or before["eod"],
        mock_data=before["mock_data"],
        data_cache=given.data_cache or (before["data_cache"] and Path(before["data_cache"])),
    )


def _refuse_other_model(recipe: Recipe, old: Run) -> None:
    """By the recipe that the old run kept: not every checkpoint says what it is of."""
    kept = old.path / "recipe" / f"{recipe.name}.py"
    try:
        was = recipes_index.with_text(
            recipes_index.load(str(kept)), old.manifest["recipe"].get("changes", ())
        )
    except CppmegaError:
        return  # an older release's: the checkpoint's own check says what it can
    # A loop learns a vector for every position.
    shape = (*_SHAPE, "seq_length") if recipe.kind == "loop" else _SHAPE
    other = [
        f"{name} {getattr(was, name)} and {getattr(recipe, name)}"
        for name in shape
        if getattr(was, name) != getattr(recipe, name)
    ]
    if other:
        raise CppmegaError(
            "run-of-another-model",
            f"{old.name} and this launch differ: {', '.join(other)}.",
            "The weights of its checkpoint do not fit.",
            "the --set with which it was launched: "
            + (" ".join(f"--set {text}" for text in old.manifest["recipe"]["changes"]) or "none"),
        )
