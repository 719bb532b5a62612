"""The data is there, whole, made for this model's vocabulary, and what its card says it is."""

from __future__ import annotations

from pathlib import Path

from cppmega import corpus, trainer_checks
from cppmega.check import Context, NotApplicable
from cppmega.errors import CppmegaError

AFTER: tuple[str, ...] = ("recipe_complete",)

_AT_ONCE = 2 * 2**30
"""Bytes that are hashed without being asked to: a few seconds."""


def check(context: Context) -> str:
    """Open it as the trainer does, and hash it.

    Raises:
        CppmegaError: what `trainer_checks.check_data` raises, `data-changed`.
        NotApplicable: the launch is not our trainer's.
    """
    line, recipe = context.line, context.recipe
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
