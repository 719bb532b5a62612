"""The checkpoint that the run resumes from is intact, runs no code, and is of the same model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cppmega.checkpoints import files as checkpoint_files
from cppmega.checkpoints import shapes as checkpoint_shapes
from cppmega.checkpoints import tracker as checkpoint_tracker
from cppmega.errors import CppmegaError
from cppmega.host import console, progress
from cppmega.preflight.ask import ask
from cppmega.preflight.context import Context
from cppmega.preflight.findings import NotApplicable, Problems
from cppmega.preflight.messages import CheckpointAnswer, CheckpointOrder
from cppmega.recipe import Recipe

AFTER: tuple[str, ...] = ("imported_process", "line_parses")

_WORKER = "cppmega.preflight.workers.checkpoint"
_MODEL = (
    *("hidden_size", "num_layers", "num_attention_heads", "num_experts", "mtp_num_layers"),
    "hybrid_layer_pattern",
)


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that is intact."""

    step: str
    arguments: Mapping[str, Any]
    """Megatron's arguments of the run that saved it; empty if it has none."""
    shapes: Mapping[str, tuple[int, ...]]
    summed: bool
    """Whether the checksums of all tensors were compared."""


def check(context: Context) -> Problems:
    """Read it, and compare its arguments and its shapes with those of the launch.

    Yields:
        `checkpoint-of-another-recipe`, `checkpoint-of-another-model`, `nothing-to-do`.

    Raises:
        CppmegaError: `no-checkpoint`, `checkpoint-broken`, `checkpoint-runs-code`.
        NotApplicable: the run starts afresh.
    """
    load = context.options.load
    if context.recipe is not None and context.is_loop and load is not None:
        saved = _read(context, load)
        return f"{load}, step {saved.step}{_how(saved)}"
    options = context.launch_line.options
    if options.load is None:
        raise NotApplicable("the run starts from untrained weights")
    fresh = not checkpoint_tracker.exists(options.load)
    if context.recipe is None and fresh and options.load == options.save:
        # Most of Megatron's own scripts name one folder for both, also for the first start.
        raise NotApplicable(f"{options.load} holds no checkpoint yet")
    saved = _read(context, options.load)
    yield from _mismatches(context, options.load, saved)
    whose = saved.arguments.get("cppmega_recipe", "no recipe")
    of = f"of {whose}" if saved.arguments else "which does not name its recipe"
    return f"{options.load}, step {saved.step}, {of}{_how(saved)}"


def _read(context: Context, load: Path) -> Saved:
    _, folder = checkpoint_files.newest(load)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    advance = progress.lines(f"reading {folder}", size, console.say)
    complete = checkpoint_files.read(load, deep=context.deep, advance=advance)
    order = CheckpointOrder(archives=[*complete.archives])
    answer = ask(_WORKER, order, CheckpointAnswer, context.environ)
    if answer.problem is not None:
        raise CppmegaError.from_json(answer.problem)
    shapes, summed = complete.shapes, complete.summed
    return Saved(complete.step, answer.arguments, shapes, summed)


def _how(saved: Saved) -> str:
    if saved.summed:
        return ", every checksum matches"
    return ", its sizes are right; --deep compares its checksums"


def _mismatches(context: Context, load: Path, saved: Saved) -> Iterator[CppmegaError]:
    recipe, args = context.recipe, vars(context.megatron_args)
    whose = saved.arguments.get("cppmega_recipe")
    if recipe is not None and whose not in (None, recipe.name):
        yield CppmegaError(
            "checkpoint-of-another-recipe",
            f"{load} holds step {saved.step} of recipe {whose}, not of {recipe.name}.",
            "The run would resume from another model's weights, or write both into one folder.",
            "another --save folder, or the recipe that wrote it",
        )
        return
    last = recipe.train_iters if recipe is not None else args["train_iters"]
    if saved.step.isdigit() and last is not None and int(saved.step) >= last:
        yield CppmegaError(
            "nothing-to-do",
            f"{load} holds step {saved.step}, and the run ends at step {last}.",
            "It would load the checkpoint, train nothing, and end with success.",
            "--set train_iters=... with more steps, or another --save folder",
        )
    other = [*_other_arguments(saved.arguments, args), *_other_shapes(saved, recipe)]
    if other:
        yield _other_model(load, other)


def _other_arguments(saved: Mapping[str, Any], args: Mapping[str, Any]) -> Iterator[str]:
    for name in _MODEL:
        # Megatron counts layers of a pattern itself, after it has parsed the line.
        if saved.get(name) is not None and args.get(name) not in (None, saved[name]):
            yield f"{name} {saved[name]} and {args[name]}"


def _other_shapes(saved: Saved, recipe: Recipe | None) -> Iterator[str]:
    """Differences visible in the tensors, even where the checkpoint records no arguments."""
    there = checkpoint_shapes.facts(saved.shapes)
    if recipe is None or "hidden_size" not in there:
        return
    if there["vocab_size"] != recipe.padded_vocab_size:
        yield f"rows of the embedding {there['vocab_size']} and {recipe.padded_vocab_size}"
    if there["hidden_size"] != recipe.hidden_size and not saved.arguments:
        yield f"hidden_size {there['hidden_size']} and {recipe.hidden_size}"
    if there["mtp_num_layers"] != recipe.mtp_num_layers and not saved.arguments:
        yield f"mtp_num_layers {there['mtp_num_layers']} and {recipe.mtp_num_layers}"


def _other_model(load: Path, other: list[str]) -> CppmegaError:
    return CppmegaError(
        "checkpoint-of-another-model",
        f"{load} and the launch differ: {', '.join(other)}.",
        "Its weights do not fit, or Megatron silently loads the part that does.",
        "another --load or --save folder, or the same --set as when it was written",
    )
