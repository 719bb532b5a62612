"""A depthwise causal convolution with SiLU within documents, in plain torch, on any device.

It is the causal convolution of each channel used by Mamba and related models:

    y[t] = silu(bias + sum over j of weight[taps - 1 - j] * x[t - j])

where j runs from 0 to `taps - 1`, but not beyond the beginning of the token's document.

Everything is computed in fp32 and rounded once; in fp64 everything is fp64. Gradients come from
autograd.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cppmega.ops.common.numerics import wide


def packed_conv(x: Tensor, weight: Tensor, bias: Tensor, bounds: Tensor | None = None) -> Tensor:
    """Convolve `[s, b, C]` along s.

    Args:
        x: any floating-point type.
        weight: `[C, taps]`; the last tap is that of the token itself, as in `torch.nn.Conv1d`.
        bias: `[C]`.
        bounds: `[documents + 1]`, where documents begin and the last one ends, ascending; None:
            each of the b sequences is one document.

    Returns:
        `[s, b, C]` in the type of x.
    """
    s, taps = len(x), weight.size(1)
    before, value = positions(s, bounds, x.device)[:, None, None], wide(x)
    total = wide(bias).expand(value.shape)
    for j in range(min(taps, max(s, 1))):  # of no token, one tap, by which all have a gradient
        # Up to torch 2.8, `pad` refuses a batch of no sequences.
        shifted = torch.cat((value.new_zeros(j, *value.shape[1:]), value[: s - j]))
        total = total + (wide(weight)[:, taps - 1 - j] * shifted).masked_fill(before < j, 0)
    return torch.nn.functional.silu(total).to(x.dtype)


def positions(length: int, bounds: Tensor | None, device: torch.device) -> Tensor:
    """The position of each token in its document, from 0, int32 `[length]`."""
    at = torch.arange(length, dtype=torch.int32, device=device)
    if bounds is None:
        return at
    starts = bounds.int().contiguous()  # as searchsorted wants it
    return at - starts[torch.searchsorted(starts, at, right=True) - 1]
