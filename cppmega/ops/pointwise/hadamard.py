"""Walsh-Hadamard transform: one Triton kernel on CUDA and plain torch elsewhere, bitwise equal.

torch is imported inside the functions, because a page imports this module, and pages must load
without torch.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@functools.cache
def walsh_hadamard_autograd() -> Any:
    """Return the autograd function of `walsh_hadamard`, which is created on first use."""
    import torch

    class WalshHadamard(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
            ctx.scale = scale
            n = x.size(-1)
            if n < 1 or n & (n - 1):
                raise ValueError(f"the last dimension must be a power of two, got {n}")
            kernel = _kernel() if x.is_cuda else None
            if kernel is not None and kernel.fits(x):
                out: torch.Tensor = kernel.transform(x, scale)
                return out
            return _stage_by_stage(x, scale)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            # H is symmetric: the gradient is the same transform.
            return walsh_hadamard(grad, ctx.scale), None

    return WalshHadamard.apply


@functools.cache
def _kernel() -> Any:
    """Return the module with the kernel; None if Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    from cppmega.ops.pointwise import hadamard_triton

    return hadamard_triton


def _stage_by_stage(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Transform `[..., n]` in log2(n) passes over memory."""
    import torch

    # A copy, because every other stage writes into this buffer.
    sums = x.to(
        torch.float64 if x.dtype == torch.float64 else torch.float32,
        copy=True,
        memory_format=torch.contiguous_format,
    )
    spare = torch.empty_like(sums)
    for stride in (1 << stage for stage in range(x.size(-1).bit_length() - 1)):
        pairs = (x.numel() // (2 * stride), 2, stride)
        low, high = sums.view(pairs).unbind(1)
        out = spare.view(pairs)
        torch.add(low, high, out=out[:, 0])
        torch.sub(low, high, out=out[:, 1])
        sums, spare = spare, sums
    return sums.mul_(scale).to(x.dtype)


def walsh_hadamard(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Compute `scale * x @ H` over the last dimension, with the Hadamard matrix H in natural order.

    The sums are those of the CUDA kernel of `fast_hadamard_transform.hadamard_transform`, in the
    same order: fp32 (fp64 for fp64), strides 1, 2, 4..., the scale, then one rounding to the dtype
    of x. There is no matrix product, so that the result depends neither on TF32 nor on the batch
    size.

    Raises:
        ValueError: the last dimension is not a power of two.
    """
    out: torch.Tensor = walsh_hadamard_autograd()(x, scale)
    return out
