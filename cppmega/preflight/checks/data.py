"""The data exists, fits this model's vocabulary, and is read completely before training."""

from __future__ import annotations

from pathlib import Path

from cppmega.data import corpus
from cppmega.data.reading import Allowance
from cppmega.host import console
from cppmega.preflight.context import Context
from cppmega.preflight.findings import NotApplicable

AFTER: tuple[str, ...] = ("recipe_complete",)


def check(context: Context) -> str:
    """Open it as the trainer does, and read what no earlier launch has read.

    Raises:
        CppmegaError: what `data_requirements.check` raises.
        NotApplicable: the launch is not our trainer's.
    """
    recipe = context.recipe
    options = context.launch_line.options
    if recipe is None:
        raise NotApplicable("no recipe is named: line_data checks the data of the line")
    fingerprint = context.data.fingerprint
    if options.mock_data:
        return "mock data"
    tokens = sum(corpus.open_(Path(prefix)).tokens for prefix in options.data)
    trained = recipe.train_iters * recipe.global_batch_size * recipe.seq_length
    held_out = f"; held out: {context.data.held_out}" if context.data.held_out else ""
    return (
        f"{how_read(context.allowance)}; {fingerprint}: {tokens} tokens; the run trains on "
        f"{trained / tokens:.2f} times as many{held_out}"
    )


def how_read(allowance: Allowance) -> str:
    """How much of the datasets was read; what was left out is also a warning on stderr."""
    if allowance.left_out:
        prefixes = " ".join(str(prefix) for prefix in allowance.left_out)
        seconds = sum(too_long.seconds for too_long in allowance.left_out.values())
        speed = min(too_long.speed for too_long in allowance.left_out.values())
        warning = (
            f"NOT READ COMPLETELY (about {seconds / 60:.0f} minutes at {speed / 1e9:.2f} GB/s): "
            f"python -m cppmega.check_data {prefixes}"
        )
        console.say(f"warning: data {warning}")
        return warning
    if allowance.read_now:
        took = sum(reading.seconds for reading in allowance.read_now)
        return f"read completely in {took:.1f} s"
    return "read completely by an earlier launch, and unchanged since"
