"""`ngram_hash` in plain Python, token by token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def embedding(
    documents: Sequence[Sequence[int]], hashed_with: Tensor, tables: Tensor, projection: Tensor
) -> Tensor:
    """The n-gram embedding of every token, document by document.

    Args:
        documents: the tokens of each document.
        hashed_with: the result of `ngram_hash.hashing`.
        tables: [rows, dim], all tables concatenated.
        projection: [hidden, tables * dim].

    Returns:
        [tokens, hidden], of the tables' type.
    """
    vectors = [
        torch.cat(_parts(document[: place + 1], hashed_with, tables)) @ projection.t()
        for document in documents
        for place in range(len(document))
    ]
    return torch.stack(vectors)


def _parts(tokens: Sequence[int], hashed_with: Tensor, tables: Tensor) -> list[Tensor]:
    """The rows of each table for the n-gram at the end of a text."""
    parts, first = [], 0
    for size, *multipliers in hashed_with.tolist():
        used = [number for number in multipliers if number]
        if len(used) > len(tokens):
            parts.append(torch.zeros_like(tables[0]))
        else:
            hashed = sum(a * b for a, b in zip(used, reversed(tokens), strict=False))
            parts.append(tables[first + hashed % size])
        first += size
    return parts
