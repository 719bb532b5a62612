"""The checkpoint that the run goes on from is whole, and of the same model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cppmega import trainer_checks
from cppmega.check import Context, NotApplicable, refuse
from cppmega.errors import CppmegaError

AFTER: tuple[str, ...] = ("imported_process", "line_parses")

_MODEL = (
    *("hidden_size", "num_layers", "num_attention_heads", "num_experts", "mtp_num_layers"),
    "hybrid_layer_pattern",
)


def check(context: Context) -> str:
    """Compare the arguments in it with those of the line.

    Raises:
        CppmegaError: `no-checkpoint`, `checkpoint-broken`, `checkpoint-of-another-recipe`,
            `checkpoint-of-another-model`, `nothing-to-train`.
        NotApplicable: the run starts afresh.
    """
    load: Path | None = context.options["load"]
    if context.is_loop and load is not None:
        trainer_checks.check_checkpoint(load)
        _refuse_broken(load, context.process["checkpoint"])
        return str(load)
    run = context.line.run
    if run.load is None:
        raise NotApplicable("the run starts from untrained weights")
    fresh = not (run.load / trainer_checks.CHECKPOINT).is_file()
    if context.recipe is None and fresh and run.load == run.save:
        # As most of Megatron's own scripts say it: a start, which can be started again.
        raise NotApplicable(f"{run.load} holds no checkpoint yet")
    trainer_checks.check_checkpoint(run.load)
    saved = context.process["checkpoint"]
    _refuse_broken(run.load, saved)
    if saved is None:
        return f"{run.load}, which does not say whose it is"
    refuse(_found(context, saved))
    return f"{run.load}, step {saved['iteration']}, of {saved.get('cppmega_recipe', 'no recipe')}"


def _refuse_broken(load: Path, saved: Mapping[str, Any] | None) -> None:
    if saved is not None and "broken" in saved:
        raise CppmegaError(
            "checkpoint-broken",
            f"The newest checkpoint in {load} cannot be read: {saved['broken']}",
            "Every rank would end when it loads it.",
            "write the step of an older checkpoint of that folder into "
            f"{trainer_checks.CHECKPOINT}, or another --load",
        )


def _found(context: Context, saved: Mapping[str, Any]) -> Iterator[CppmegaError]:
    run, recipe, args = context.line.run, context.recipe, context.process["line"]["args"]
    whose = saved.get("cppmega_recipe")
    if recipe is not None and whose not in (None, recipe.name):
        yield CppmegaError(
            "checkpoint-of-another-recipe",
            f"{run.load} holds step {saved['iteration']} of recipe {whose}, not of {recipe.name}.",
            "The run would go on from another model's weights, or mix both in one folder.",
            "another --save folder, or the recipe that made it",
        )
        return
    last = recipe.train_iters if recipe is not None else args["train_iters"]
    if saved["iteration"].isdigit() and last is not None and int(saved["iteration"]) >= last:
        yield CppmegaError(
            "nothing-to-train",
            f"{run.load} holds step {saved['iteration']}, and the run ends at step {last}.",
            "It would load the checkpoint, do nothing, and end as if all were well.",
            "--set train_iters=... with more steps, or another --save folder",
        )
    other = [
        f"{name} {saved[name]} and {args[name]}"
        for name in _MODEL
        # Megatron counts layers of a pattern itself, after it has parsed the line.
        if saved.get(name) is not None and args.get(name) not in (None, saved[name])
    ]
    if other:
        yield CppmegaError(
            "checkpoint-of-another-model",
            f"{run.load} and the line differ: {', '.join(other)}.",
            "Its weights do not fit, or Megatron takes the part that does.",
            "another --save folder, or the --set with which it was made",
        )
