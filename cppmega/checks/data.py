"""The data is there, whole, made for this model's vocabulary, and what its card says it is."""

from __future__ import annotations

from pathlib import Path

from cppmega import corpus, trainer_checks
from cppmega.check import Context, NotApplicable
from cppmega.errors import CppmegaError
from cppmega.recipe import Recipe

AFTER: tuple[str, ...] = ("recipe_complete",)

_AT_ONCE = 2 * 2**30
"""Bytes that are hashed without being asked to: a few seconds."""


def check(context: Context) -> str:
    """Open it as the trainer does, and hash it.

    Raises:
        CppmegaError: what `trainer_checks.check_data` raises, `data-changed`.
        NotApplicable: the launch is not our trainer's.
    """
    recipe, given = context.recipe, context.options["data"]
    if recipe is not None and context.is_loop and given:
        return _of_a_loop(recipe, Path(given[-1]))
    line = context.line
    if recipe is None:
        raise NotApplicable("no recipe is named: Megatron's own checks look at the data")
    found = trainer_checks.check_data(recipe, line.run, line.tokenizer, line.eod)
    if line.run.mock_data:
        return "mock data"
    unhashed = [p for p in line.run.data if not _as_its_card_says(Path(p), context.deep)]
    tokens = sum(corpus.open_(Path(prefix)).tokens for prefix in line.run.data)
    taken = recipe.train_iters * recipe.global_batch_size * recipe.seq_length
    return (
        f"{found.fingerprint}: {tokens} tokens; the run takes {taken / tokens:.2f} times as many"
        + (f"; too large to hash without --deep: {', '.join(unhashed)}" if unhashed else "")
    )


def _of_a_loop(recipe: Recipe, folder: Path) -> str:
    """A loop builds its corpus in a folder, or goes on with the one that it built there."""
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
            corpus.check_ids(corpus.open_(folder / part), recipe.vocab_size)
        except CppmegaError as error:
            again = "leave --data out: the run builds a corpus of its own; or name another folder"
            raise CppmegaError(error.name, error.what, error.why, again) from None
    return f"the corpus in {folder}"


def _as_its_card_says(prefix: Path, deep: bool) -> bool:
    """Whether the files could be compared with their card."""
    card = corpus.read_card(prefix)
    size = corpus.with_suffix(prefix, ".bin").stat().st_size
    if card is None or (size > _AT_ONCE and not deep):
        return False
    if corpus.digest(prefix) != (card.bin_sha256, card.idx_sha256):
        raise CppmegaError(
            "data-changed",
            f"{prefix} is not what its card describes: its hash is another one.",
            "The run would be filed under the fingerprint of other data.",
            "prepare the data again, under another name",
        )
    return True
