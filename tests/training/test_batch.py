"""Every rank refuses a micro-batch that its model cannot be trained on, before it is copied."""

from __future__ import annotations

from typing import Any

import pytest

from cppmega.errors import CppmegaError
from cppmega.training.batch import check_batch, next_batch
from tests.preflight.contexts import SLICE

torch = pytest.importorskip("torch")

VOCAB = 60_000
RECIPE = SLICE.with_(vocab_size=VOCAB)


def batch(**wrong: tuple[int, float]) -> dict[str, Any]:
    """A micro-batch, one value of which may be another."""
    found = {
        "tokens": torch.arange(16).reshape(2, 8),
        "labels": torch.arange(1, 17).reshape(2, 8),
        "loss_mask": torch.ones(2, 8),
        "position_ids": torch.arange(8).repeat(2, 1),
    }
    for name, (place, value) in wrong.items():
        found[name].view(-1)[place] = value
    return found


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (
            {"tokens": (5, VOCAB)},
            "token-out-of-vocabulary",
            f"tokens of a micro-batch hold id {VOCAB}",
        ),
        ({"tokens": (15, -1)}, "token-out-of-vocabulary", "id -1"),
        ({"labels": (0, VOCAB)}, "token-out-of-vocabulary", "labels"),
        ({"labels": (3, -100)}, "token-out-of-vocabulary", "id -100"),
        ({"loss_mask": (3, float("nan"))}, "loss-mask-broken", "nan"),
        ({"loss_mask": (3, float("inf"))}, "loss-mask-broken", "inf"),
        ({"loss_mask": (3, -1.0)}, "loss-mask-broken", "-1.0"),
    ],
)
def test_a_batch_with_a_wrong_value(
    packed: bool, wrong: dict[str, tuple[int, float]], error: str, words: str
) -> None:
    """An id of the padded part of the embedding has a row, and stands for nothing."""
    recipe = RECIPE.with_(packed_documents=packed)
    assert recipe.padded_vocab_size > VOCAB
    with pytest.raises(CppmegaError) as caught:
        next_batch(recipe, iter([batch(**wrong)]), VOCAB - 1, "cpu")
    assert caught.value.name == error and words in caught.value.what


def test_context_parallel_ranks_get_pieces_from_both_ends() -> None:
    recipe = RECIPE.with_(gpus=2, context_parallel_size=2, packed_documents=False)
    for rank, places in enumerate(([0, 1, 6, 7], [2, 3, 4, 5])):
        found, whole = next_batch(recipe, iter([batch()]), 0, "cpu", rank), batch()
        for name, values in whole.items():
            assert torch.equal(getattr(found, name), values[:, places]), name


def test_a_right_batch() -> None:
    whole = batch(tokens=(0, VOCAB - 1), labels=(0, 0), loss_mask=(0, 0.0))
    check_batch(whole["tokens"], whole["labels"], whole["loss_mask"], VOCAB)
    plain = RECIPE.with_(packed_documents=False)
    # A tensor on the meta device has no values: reading one back, as a host sync does, raises.
    assert next_batch(plain, iter([whole]), 0, "meta").tokens.device.type == "meta"
