"""Megatron's datasets with the structure ids of their tokens.

The ids of a dataset are another indexed dataset of the same documents. Megatron's own sample index
is queried twice, for the tokens and for their ids: however it shuffles, cuts and joins, both come
from the same places. Every rank has its own loader, so no form of parallelism has to send them.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset

from cppmega.data.structure import COLUMN, LEVELS, Kind

Sample = dict[str, torch.Tensor]


class StructureGPTDataset(GPTDataset):  # type: ignore[misc]
    """GPTDataset whose samples also have `structure_kinds` and `structure_depths`, int64 [s]."""

    def __init__(self, dataset: Any, path: str, *others: Any) -> None:
        """Take Megatron's arguments, and open the ids next to the tokens.

        Args:
            dataset: the tokens.
            path: its prefix.
            others: as GPTDataset takes them.
        """
        super().__init__(dataset, path, *others)
        mapped = self.config.mmap_bin_files
        self._codes = _twin(self, IndexedDataset(path + COLUMN, multimodal=False, mmap=mapped))

    def __getitem__(self, which: int | None) -> Sample:
        """Megatron's sample with the ids of its tokens."""
        return _with_ids(super().__getitem__(which), self._codes, which)


class MockStructureGPTDataset(MockGPTDataset):  # type: ignore[misc]
    """MockGPTDataset with made-up ids for its made-up tokens."""

    def __init__(self, dataset: Any, *others: Any) -> None:
        """Take Megatron's arguments.

        Args:
            dataset: the tokens.
            others: as MockGPTDataset takes them.
        """
        super().__init__(dataset, *others)
        self._codes = _twin(self, _MockCodes(dataset.sequence_lengths))

    def __getitem__(self, which: int | None) -> Sample:
        """Megatron's sample with made-up ids."""
        return _with_ids(super().__getitem__(which), self._codes, which)


class _MockCodes:
    """Random structure codes for documents of given lengths, the same at every reading."""

    def __init__(self, lengths: np.ndarray[Any, Any]) -> None:
        self._lengths = lengths

    def get(self, document: int, offset: int = 0, length: int | None = None) -> Any:
        """Some of the codes of a document; without a length, all from the offset on."""
        drawn = np.random.default_rng(int(document)).integers(
            len(Kind) * LEVELS, size=int(self._lengths[document])
        )
        return drawn[offset : None if length is None else offset + length]


def _twin(dataset: Any, codes: Any) -> Any:
    """A dataset's twin, which finds the same places in other documents."""
    twin = copy.copy(dataset)
    twin.dataset = codes
    return twin


def _with_ids(sample: Sample, codes: Any, which: int | None) -> Sample:
    # Megatron requests None to fill a batch, and returns the first sample without a loss.
    ids = codes._query_document_sample_shuffle_indices(0 if which is None else which)[0]
    # The last one belongs to the label of the last token; a short sample is padded with -1.
    own = torch.from_numpy(ids[: len(sample["tokens"])]).long().clamp(min=0)
    return {**sample, "structure_kinds": own // LEVELS, "structure_depths": own % LEVELS}
