"""Small inputs for the tests of the MTP loss, and its logged values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch

DEPTHS = 2


def hidden_states(sequence: int, batch: int) -> torch.Tensor:
    """Return the output of the decoder and of each depth in one tensor."""
    generator = torch.Generator().manual_seed(1)
    shape = ((1 + DEPTHS) * sequence, batch, 5)
    return torch.randn(shape, generator=generator, requires_grad=True)


def loss_of_logits(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Replace the cross-entropy by a loss that depends on the label of each token."""
    return logits.float().pow(2).sum(-1).t() * (labels + 1)


@contextlib.contextmanager
def logged(module: ModuleType) -> Iterator[list[Any]]:
    """Collect the losses that a `multi_token_prediction` module logs, one per depth."""
    losses: list[Any] = []

    def save(loss: Any, *_: Any, **__: Any) -> None:
        losses.append(loss)

    group = "get_data_parallel_group"
    with (
        mock.patch.object(module.MTPLossLoggingHelper, "save_loss_to_tracker", save),
        mock.patch.object(module.parallel_state, group, lambda *_, **__: None),
    ):
        yield losses
