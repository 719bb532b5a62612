"""Data of the CPU smoke run: our own sources as bytes, packed into padded documents.

Every document is padded inside the pack to a multiple of a few tokens, as context parallelism and
FP8 need it, so `cu_seqlens_q` (real lengths) and `cu_seqlens_q_padded` (positions) differ.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cppmega.recipe import Recipe
from cppmega.smoke import corpus as smoke_text

END = 256
"""Token behind the last byte of a document."""


@dataclass(frozen=True)
class Pack:
    """One packed batch: everything is [1, T], T = micro_batch_size * seq_length."""

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    lengths: list[int]
    """Real tokens of each document."""
    starts: list[int]
    """Padded boundaries: document i stands at starts[i] ... starts[i] + lengths[i]."""

    def through(self, model: Any) -> torch.Tensor:
        """Loss per token, [1, T]."""
        per_token: torch.Tensor = model(
            self.tokens,
            self.position_ids,
            None,
            labels=self.labels,
            loss_mask=self.loss_mask,
            packed_seq_params=self.params(),
        )
        return per_token

    def params(self) -> Any:
        """Megatron's PackedSeqParams, with the true and the padded boundaries."""
        from megatron.core.packed_seq_params import PackedSeqParams

        real = torch.tensor([0, *np.cumsum(self.lengths)], dtype=torch.int32)
        padded = torch.tensor([*self.starts, self.tokens.size(1)], dtype=torch.int32)
        longest = max(b - a for a, b in itertools.pairwise(padded))
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=real,
            cu_seqlens_kv=real,
            cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded,
            max_seqlen_q=int(longest),
            max_seqlen_kv=int(longest),
        )

    def true_labels(self, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Labels and mask of an MTP depth (0: the main head), document by document.

        A plain loop over documents: the truth that Megatron's rolled labels are compared with.
        """
        labels, mask = torch.zeros_like(self.labels), torch.zeros_like(self.loss_mask)
        for start, length in zip(self.starts, self.lengths, strict=True):
            end = start + length
            if length > depth:
                labels[0, start : end - depth] = self.labels[0, start + depth : end]
                mask[0, start : end - depth] = self.loss_mask[0, start + depth : end]
        return labels, mask


def build(folder: Path) -> None:
    """Write the indexed datasets `train` and `held_out` (one document in ten), once.

    A folder that has them is left as it is, so that two runs can share their data.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    if (folder / "held_out.idx").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    documents = smoke_text.paragraphs()
    smoke_text.write_card(folder, documents)
    for name, held_out in (("train", False), ("held_out", True)):
        builder = IndexedDatasetBuilder(str(folder / f"{name}.bin"), dtype=np.int32)
        for text in documents:
            if (hashlib.sha256(text).digest()[0] < 26) == held_out:
                builder.add_document(torch.tensor([*text, END]), [len(text) + 1])
        builder.finalize(str(folder / f"{name}.idx"))


def packs(prefix: Path, recipe: Recipe, seed: int) -> Iterator[Pack]:
    """Endless packs, the documents in an order that the seed decides."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    size = recipe.micro_batch_size * recipe.seq_length
    order: list[int] = []
    generator = np.random.default_rng(seed)
    while True:
        documents: list[np.ndarray[Any, Any]] = []
        room = size
        while room > 0:
            if not order:
                order = generator.permutation(len(dataset)).tolist()
            # one token more than fits: the label of the last one
            document = dataset[order.pop()][: min(recipe.seq_length, room) + 1]
            if len(document) < 2:
                continue
            documents.append(document)
            room -= _padded(len(document) - 1, recipe.document_multiple)
        yield _pack(documents, size, recipe.document_multiple)


def _padded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _pack(documents: list[np.ndarray[Any, Any]], size: int, multiple: int) -> Pack:
    tokens, labels = np.zeros((1, size), np.int64), np.zeros((1, size), np.int64)
    mask, positions = np.zeros((1, size), np.float32), np.zeros((1, size), np.int64)
    lengths, starts, at = [], [], 0
    for document in documents:
        length = len(document) - 1
        tokens[0, at : at + length] = document[:-1]
        labels[0, at : at + length] = document[1:]
        mask[0, at : at + length] = 1.0
        positions[0, at : at + length] = np.arange(length)
        lengths.append(length)
        starts.append(at)
        at += _padded(length, multiple)
    return Pack(
        tokens=torch.from_numpy(tokens),
        labels=torch.from_numpy(labels),
        loss_mask=torch.from_numpy(mask),
        position_ids=torch.from_numpy(positions),
        lengths=lengths,
        starts=starts,
    )
