"""Batches of the CPU smoke run: the documents of an indexed dataset as bytes, packed and padded.

Every document is padded inside the pack to a multiple of a few tokens, as context parallelism and
FP8 need it, so `cu_seqlens_q` (real lengths) and `cu_seqlens_q_padded` (positions) differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cppmega.recipe import Recipe
from cppmega.training.packing import Packed, pack

from . import corpus

Documents = Sequence[np.ndarray[Any, Any]]

END = 256
"""Token after the last byte of a document."""


def build(folder: Path) -> None:
    """Write the indexed datasets `train` and `held_out`, once.

    A folder that has them is left as it is, so that two runs can share their data.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    if (folder / "held_out.idx").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    documents = corpus.documents()
    corpus.write_card(folder, documents)
    for name, held_out in (("train", False), ("held_out", True)):
        builder = IndexedDatasetBuilder(str(folder / f"{name}.bin"), dtype=np.int32)
        for text in documents:
            if corpus.held_out(text) == held_out:
                builder.add_document(torch.tensor([*text, END]), [len(text) + 1])
        builder.finalize(str(folder / f"{name}.idx"))


def packs(prefix: Path, recipe: Recipe, seed: int) -> Iterator[Packed]:
    """Endless micro-batches of an indexed dataset."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    return packed(IndexedDataset(str(prefix)), recipe, seed)


def packed(documents: Documents, recipe: Recipe, seed: int) -> Iterator[Packed]:
    """Endless micro-batches of the recipe, the documents in an order that the seed decides."""
    tokens = _tokens(documents, seed)
    rows, columns = recipe.micro_batch_size, recipe.seq_length + 1
    while True:
        samples = torch.tensor(list(islice(tokens, rows * columns))).view(rows, columns)
        mask = torch.ones(rows, columns - 1)
        yield pack(samples[:, :-1], samples[:, 1:], mask, END, recipe.document_multiple)


def _tokens(documents: Documents, seed: int) -> Iterator[int]:
    """The documents in sequence, reshuffled in each epoch."""
    generator = np.random.default_rng(seed)
    while True:
        for number in generator.permutation(len(documents)):
            yield from documents[int(number)].tolist()


def loss_per_token(model: Any, batch: Packed) -> torch.Tensor:
    """The main head's loss of each token, [1, T]; training adds the gradients of the MTP heads."""
    losses: torch.Tensor = model(
        batch.tokens,
        batch.position_ids,
        None,
        labels=batch.labels,
        loss_mask=batch.loss_mask,
        packed_seq_params=batch.params("cpu"),
    )
    return losses


def true_labels(batch: Packed, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels and mask of an MTP depth (0: the main head), document by document.

    A plain loop over documents: the truth that Megatron's rolled labels are compared with.
    """
    labels, mask = torch.zeros_like(batch.labels), torch.zeros_like(batch.loss_mask)
    for start, length in zip(batch.starts, batch.lengths, strict=True):
        end = start + length
        if length > depth:
            labels[0, start : end - depth] = batch.labels[0, start + depth : end]
            mask[0, start : end - depth] = batch.loss_mask[0, start + depth : end]
    return labels, mask
