"""fp32 split exactly into three bf16 parts, for products with bf16 on tensor cores.

A tensor core truncates when it adds to its accumulator. In a long chain the errors, all towards
zero, become a factor common to all products, which no sum over tokens averages out: -7e-7 after 256
columns, far more than the rounding of fp32, and proportional to their number. So the tensor core
sums only one step of a kernel's loop, starting from zero and with the smallest part first; the
result is added to the accumulated sums outside the tensor core and rounded to nearest. Triton does
the same with TF32.

Phi is split once per pass, by a launch of `_phi_parts_kernel`: phi is a ten-thousandth of the
streams, and each tile of tokens would repeat the split. Its grid is blocks of phi's elements, each
of which is read once and written once in three parts; it is limited by memory bandwidth.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cppmega.ops.common.dispatch import interpreted
from cppmega.ops.common.launch import on_its_device

# The interpreter has no product of bf16.
PART = tl.constexpr(tl.float32 if interpreted() else tl.bfloat16)

ELEMENTS = 1024


@triton.jit
def in_parts(x):
    """Split fp32 into a sum of three bf16 values, each nearest to the residual."""
    high = x.to(tl.bfloat16)
    residual = x - high.to(tl.float32)
    middle = residual.to(tl.bfloat16)
    return high, middle, (residual - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def store_parts(parts, offs, x, mask, size):
    """Store the three parts of `x`, `size` elements apart."""
    high, middle, low = in_parts(x)
    tl.store(parts + offs, high, mask=mask)
    tl.store(parts + size + offs, middle, mask=mask)
    tl.store(parts + 2 * size + offs, low, mask=mask)


@triton.jit
def product(left, high, middle, low):
    """`left @ (high + middle + low)` in fp32; left is bf16."""
    left = left.to(PART)
    step = tl.dot(left, low.to(PART))
    step = tl.dot(left, middle.to(PART), step)
    return tl.dot(left, high.to(PART), step)


@on_its_device
@triton.jit
def _phi_parts_kernel(phi, parts, size, ELEMENTS: tl.constexpr):
    offs = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    mask = offs < size
    store_parts(parts, offs, tl.load(phi + offs, mask=mask, other=0.0), mask, size)


@torch.library.custom_op("cppmega::mhc_phi_parts", mutates_args=("parts",))
def phi_parts(phi: Tensor, parts: Tensor) -> None:
    """Split phi `[V, n * C]` in fp32 into its parts `[3, V, n * C]` in bf16; both contiguous."""
    size = phi.numel()
    _phi_parts_kernel[(triton.cdiv(size, ELEMENTS),)](
        phi, parts, size, ELEMENTS=ELEMENTS, num_warps=4
    )


def factor(phi: Tensor, dtype: torch.dtype) -> Tensor:
    """The factor for streams of this type: the parts of phi for bf16, otherwise phi."""
    if dtype != torch.bfloat16:
        return phi
    parts = phi.new_empty(3, *phi.shape, dtype=dtype)
    phi_parts(phi, parts)
    return parts
