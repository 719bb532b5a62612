"""The rotary embedding and Hadamard transform of DSA's indexer in plain torch, on any device.

The reference for the kernel: computed in fp32 (fp64 for fp64 inputs) and rounded once; gradients
come from autograd.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cppmega.ops.common.numerics import wide
from cppmega.ops.pointwise.hadamard import walsh_hadamard

if TYPE_CHECKING:
    from cppmega.ops.pointwise.dsa_indexer_prologue import Rotary


def positions(count: int, rotary: Rotary, documents: Tensor | None) -> Tensor:
    """The row of the angles that each of `count` rows uses."""
    rows = torch.arange(count, device=rotary.angles.device)
    if documents is None:
        return rows
    ranks, rank = rotary.ranks
    documents = documents.to(rows.device, torch.int64)
    inner = (documents // ranks)[:-1].contiguous()
    document = torch.searchsorted(inner, rows, right=True) - 1
    begin, end = documents[document], documents[document + 1]
    near, length = rows - begin // ranks, (end - begin) // ranks
    if ranks > 1:
        # Each rank has a piece from the first half of a document and one from the second.
        half = length // 2
        back = ranks * length - (rank + 1) * half + near - half
        near = torch.where(near < half, rank * half + near, back)
    found = near + torch.where(documents[-1] == rotary.angles.size(0), begin, 0)
    return found.clamp(0, rotary.angles.size(0) - 1)


def _quarter_turn(x: Tensor, adjacent: bool) -> Tensor:
    """Map each pair of columns (a, b) to (-b, a)."""
    if adjacent:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    low, high = x.chunk(2, dim=-1)
    return torch.cat((-high, low), dim=-1)


def rotated(x: Tensor, rotary: Rotary, documents: Tensor | None, hadamard: bool) -> Tensor:
    """`[s, b, (heads,) d]` after rotary embedding and Hadamard transform, in its type."""
    width, full = rotary.angles.size(-1), wide(x)
    angles = rotary.angles.reshape(-1, width).to(full.dtype)[positions(len(x), rotary, documents)]
    angles = angles.view(len(x), *[1] * (x.ndim - 2), width)
    before, part, after = full.tensor_split((rotary.first, rotary.first + width), dim=-1)
    if rotary.gathered:
        part = torch.cat((part[..., ::2], part[..., 1::2]), dim=-1)
    turned = part * angles.cos() + _quarter_turn(part, rotary.adjacent) * angles.sin()
    full = torch.cat((before, turned * rotary.mscale, after), dim=-1)
    out = walsh_hadamard(full, x.size(-1) ** -0.5) if hadamard else full
    return out.to(x.dtype)
