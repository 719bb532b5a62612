"""A tensor times a number in device memory, rounded once.

The grid is blocks of 4096 elements. A program reads each element once and writes it once; memory
bandwidth limits it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cppmega.ops.common.launch import on_its_device

_ELEMENTS = 4096
"""Elements per program of the scaling kernel."""


@on_its_device
@triton.jit
def _scale_kernel(source, factor, out, elements, BLOCK: tl.constexpr):
    """out = factor * source in fp32, rounded once. `factor` is one number in device memory."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + offs, mask=offs < elements, other=0.0).to(tl.float32)
    value = value * tl.load(factor)
    tl.store(out + offs, value.to(out.dtype.element_ty), mask=offs < elements)


def scaled(source: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """factor * source in one pass.

    This is a separate kernel, because torch would round the factor, a number in device memory, to
    the type of a bf16 `source` before multiplying.
    """
    source = source.contiguous()
    out = torch.empty_like(source, dtype=dtype)
    if source.numel():
        grid = (triton.cdiv(source.numel(), _ELEMENTS),)
        _scale_kernel[grid](source, factor, out, source.numel(), BLOCK=_ELEMENTS, num_warps=8)
    return out
