"""The data is there, made for this model's vocabulary, and read whole before it is trained on."""

from __future__ import annotations

from pathlib import Path

from cppmega.data import corpus
from cppmega.data import reading as data_reading
from cppmega.data.reading import Allowance
from cppmega.errors import CppmegaError
from cppmega.host import console
from cppmega.preflight.context import Context
from cppmega.preflight.findings import NotApplicable
from cppmega.recipe import Recipe

AFTER: tuple[str, ...] = ("recipe_complete",)


def check(context: Context) -> str:
    """Open it as the trainer does, and read what was not read yet.

    Raises:
        CppmegaError: what `trainer_checks.check_data` raises.
        NotApplicable: the launch is not our trainer's.
    """
    recipe, given = context.recipe, context.options.data
    if recipe is not None and context.is_loop and given:
        return _of_a_loop(recipe, Path(given[-1]), context.allowance)
    options = context.line.options
    if recipe is None:
        raise NotApplicable("no recipe is named: line_data looks at the data of the line")
    fingerprint = context.data.fingerprint
    if options.mock_data:
        return "mock data"
    tokens = sum(corpus.open_(Path(prefix)).tokens for prefix in options.data)
    taken = recipe.train_iters * recipe.global_batch_size * recipe.seq_length
    return (
        f"{how_read(context.allowance)}; {fingerprint}: {tokens} tokens; the run takes "
        f"{taken / tokens:.2f} times as many"
    )


def how_read(allowance: Allowance) -> str:
    """What was read of the datasets of a launch; what was not is a warning on stderr as well."""
    if allowance.left_out:
        prefixes = " ".join(str(prefix) for prefix in allowance.left_out)
        seconds = sum(too_long.seconds for too_long in allowance.left_out.values())
        speed = min(too_long.speed for too_long in allowance.left_out.values())
        said = (
            f"NOT CHECKED WHOLE (about {seconds / 60:.0f} minutes at {speed / 1e9:.2f} GB/s): "
            f"python -m cppmega.check_data {prefixes}"
        )
        console.say(f"warning: data {said}")
        return said
    if allowance.read_now:
        took = sum(reading.seconds for reading in allowance.read_now)
        return f"read whole in {took:.1f} s"
    return "read whole by an earlier launch, and unchanged"


def _of_a_loop(recipe: Recipe, folder: Path, allowance: Allowance) -> str:
    """A loop builds its corpus in a folder, or resumes with the one that it built there."""
    if corpus.with_suffix(folder, ".idx").is_file():
        raise CppmegaError(
            "not-supported",
            f"{folder} is a dataset, and {recipe.name} trains on a corpus that it builds itself.",
            "It would build that in a folder of this name, and train on it without a word.",
            "leave --data out, or name a folder",
        )
    if not (folder / "held_out.idx").exists():  # written last
        raise NotApplicable(f"{folder} holds no corpus yet: the run builds it")
    for part in ("train", "held_out"):
        try:
            found = corpus.open_(folder / part)
            reading = allowance.read(found)
            if reading is not None:
                data_reading.check(found, reading, recipe.vocab_size)
        except CppmegaError as error:
            again = "leave --data out: the run builds a corpus of its own; or name another folder"
            raise CppmegaError(error.name, error.what, error.why, again) from None
    return f"the corpus in {folder}; {how_read(allowance)}"
