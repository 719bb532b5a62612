"""Fixed data of a training step: tokens, labels, masks and packs, cut for a rank.

Imported in the process that runs a tree, never by pytest itself.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from tests.configurations.settings import Configuration

VOCABULARY = 64
LENGTH = 32
DOCUMENTS = (8, 12, 4, 8)
"""Lengths in a pack, with padding: each can be split among two ranks twice over."""
PADDING = (1, 0, 2, 0)
SAMPLES = 2
"""Sequences of a micro-batch that is not packed."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch as one rank sees it."""

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    positions: torch.Tensor
    padding: torch.Tensor
    """True where a token is padding."""
    pack: Any
    overflows: bool
    """The gradient of its loss is not finite."""


def micro_batch(
    setting: Configuration, step: int, number: int, replica: int, context_rank: int, group: Any
) -> Batch:
    """Micro-batch `number` of a step, for one data-parallel replica and context rank."""
    samples = SAMPLES if setting.packing == "none" else 1
    generator = torch.Generator().manual_seed(1000 * step + 10 * number + replica)
    drawn = torch.randint(VOCABULARY, (samples, LENGTH + 1), generator=generator)
    lost = torch.rand(samples, LENGTH, generator=generator) < 0.1
    mask = torch.ones(samples, LENGTH).masked_fill(lost, 0.0)
    padded = torch.zeros(samples, LENGTH, dtype=torch.bool)
    bounds = boundaries(setting)
    if setting.packing == "padded":
        for end, padding in zip(bounds[1:], PADDING, strict=True):
            padded[:, end - padding : end] = True
    elif setting.padding_mask:
        padded[0, -5:] = True
    mask[padded] = 0.0
    if setting.packing != "none":
        mask[:, torch.tensor(bounds[1:]) - 1] = 0.0  # the next token is another document's
    within = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(bounds)])
    kept = rows(bounds, setting.context, context_rank)
    return Batch(
        tokens=drawn[:, :-1][:, kept],
        labels=drawn[:, 1:][:, kept],
        loss_mask=mask[:, kept],
        positions=within[kept].expand(samples, -1),
        padding=padded[:, kept],
        pack=_pack(setting, group),
        overflows=setting.optimizer == "scaled" and step == 1,
    )


def boundaries(setting: Configuration) -> list[int]:
    """Where documents begin, padding included; the whole sequence where nothing is packed."""
    lengths = DOCUMENTS if setting.packing != "none" else (LENGTH,)
    return [0, *itertools.accumulate(lengths)]


def rows(bounds: Sequence[int], ranks: int, rank: int) -> torch.Tensor:
    """Which rows of the whole sequence a context rank holds, in its order.

    Each document is cut in twice as many pieces as there are ranks; a rank has the piece of its own
    number from the front and from the back, so that causal attention costs all of them the same.
    """
    if ranks == 1:
        return torch.arange(bounds[-1])
    kept = []
    for begin, end in itertools.pairwise(bounds):
        pieces = torch.arange(begin, end).chunk(2 * ranks)
        kept += [pieces[rank], pieces[2 * ranks - 1 - rank]]
    return torch.cat(kept)


def _pack(setting: Configuration, group: Any) -> Any:
    if setting.packing == "none":
        return None
    padded = boundaries(setting)
    real = list(padded)
    if setting.packing == "padded":
        lengths = (n - p for n, p in zip(DOCUMENTS, PADDING, strict=True))
        real = [0, *itertools.accumulate(lengths)]
    known = {
        "qkv_format": "thd",
        "cu_seqlens_q": torch.tensor(real, dtype=torch.int32),
        "cu_seqlens_kv": torch.tensor(real, dtype=torch.int32),
        "max_seqlen_q": max(DOCUMENTS),
        "max_seqlen_kv": max(DOCUMENTS),
    }
    if setting.packing == "padded":
        known["cu_seqlens_q_padded"] = torch.tensor(padded, dtype=torch.int32)
        known["cu_seqlens_kv_padded"] = torch.tensor(padded, dtype=torch.int32)
    if setting.packing != "no total":
        known["total_tokens"] = padded[-1]
    fields = inspect.signature(PackedSeqParams).parameters
    return PackedSeqParams(**{name: value for name, value in known.items() if name in fields})
