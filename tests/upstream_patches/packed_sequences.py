"""Packs of documents, rolled token by token, for comparison."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace

import torch

DTYPES = (torch.int64, torch.float32, torch.bool, torch.int32, torch.bfloat16)
LEADS = ((), (1,), (2,), (1, 3), (1,))


class Pack:
    """Documents with real and padded lengths, followed by a tail."""

    def __init__(self, documents: list[tuple[int, int]], tail: int = 0, padded: bool = True):
        self.documents, self.tail = documents, tail
        self.ends = [0]
        real = [0]
        for length, slots in documents:
            real.append(real[-1] + length)
            self.ends.append(self.ends[-1] + slots)
        self.size = self.ends[-1] + tail
        self.params = SimpleNamespace(
            cu_seqlens_q=torch.tensor(real, dtype=torch.int32),
            cu_seqlens_q_padded=torch.tensor(self.ends, dtype=torch.int32) if padded else None,
        )

    def rolled(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the reference, computed token by token."""
        out = torch.zeros_like(tensor)
        for (length, _), start in zip(self.documents, self.ends, strict=False):
            for at in range(start, start + length - 1):
                out[..., at] = tensor[..., at + 1]
        return out

    def part(self, tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        """Return a rank's slots in Transformer Engine's order: pieces r and 2n-1-r per document."""
        slots = []
        for (_, length), start in zip(self.documents, self.ends, strict=False):
            if length < 2 * size:  # TE refuses it; one token per rank is all that can be meant
                slots += [start + rank] * (length // size)
                continue
            piece = length // (2 * size)
            for first in (start + rank * piece, start + (2 * size - 1 - rank) * piece):
                slots += range(first, first + piece)
        tail = self.tail // size
        slots += range(self.ends[-1] + rank * tail, self.ends[-1] + (rank + 1) * tail)
        return tensor[..., slots]


def packs(multiple: int = 1, seed: int = 0) -> Iterator[Pack]:
    """Return packs: an example, extremes, and random ones whose padded lengths are multiples."""
    whole = 2 * multiple if multiple > 1 else 1
    if multiple == 1:
        yield Pack([(3, 4), (2, 4)])
        yield Pack([])
        yield Pack([(0, 0), (1, 1), (0, 0), (0, 3), (2, 2), (0, 0)])
    yield Pack([], tail=3 * multiple)
    yield Pack([(1, whole)] * 5, tail=whole)
    draw = random.Random(seed)
    for _ in range(30 if multiple == 1 else 12):
        documents = []
        for _ in range(draw.randrange(1, 7)):
            slots = draw.choice((0, 1, 1, 2, 5)) * whole
            documents.append((draw.randint(0, slots), slots))
        if multiple > 1 and draw.random() < 0.3:  # a local piece of one token
            documents.append((multiple, multiple))
        pack = Pack(documents, tail=draw.choice((0, 0, 2 * multiple)))
        # Documents that fill exactly one rank's share look like the boundaries of a share.
        if multiple == 1 or pack.size == 0 or pack.ends[-1] * multiple != pack.size:
            yield pack


def full(documents: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(slots, slots) for _, slots in documents]


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(shape, generator=draw) < 0.5
    if dtype.is_floating_point:
        return torch.randn(shape, generator=draw).to(dtype)
    return torch.randint(1, 1000, shape, generator=draw, dtype=dtype)


def same(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape, (got, expected)
    assert got.equal(expected), (got, expected)
