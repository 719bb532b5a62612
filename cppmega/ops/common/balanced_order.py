"""How Megatron splits a sequence over context-parallel ranks.

Every document is cut into twice as many pieces as there are ranks. Rank r of n has the pieces r and
2n - 1 - r, so that causal attention costs all ranks the same.
"""

from __future__ import annotations

import torch
from torch import Tensor


def balanced_order(
    bounds: Tensor | None, length: int, ranks: int, device: torch.device | str | None = None
) -> Tensor:
    """The places in a sequence of the tokens of rank 0, then of rank 1, and so on.

    Args:
        bounds: `[documents + 1]`, where documents begin, and where the last one ends; tokens after
            it form one more. All are multiples of twice the number of ranks. None: the sequence is
            one document.
        length: the number of tokens of each rank.
        ranks: the number of ranks.
        device: the device of the result.

    Returns:
        int64 `[ranks * length]`.
    """
    if bounds is None:
        bounds = torch.arange(2, device=device) * (ranks * length)
    else:
        bounds = torch.nn.functional.pad(bounds.long(), (0, 1), value=ranks * length)
    torch._assert_async(
        (bounds % (2 * ranks) == 0).all(),
        "documents-not-divisible: the boundaries of documents are not multiples of twice the "
        "context-parallel ranks.",
    )
    starts, pieces = bounds // ranks, bounds.diff() // (2 * ranks)
    local = torch.arange(length, device=bounds.device)
    document = torch.searchsorted(starts, local, right=True) - 1
    piece, within = pieces[document], local - starts[document]
    rank = torch.arange(ranks, device=bounds.device).unsqueeze(1)
    number = torch.where(within < piece, rank, 2 * ranks - 1 - rank)
    return (bounds[document] + number * piece + within % piece).flatten()
