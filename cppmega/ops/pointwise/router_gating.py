"""The backward of a router's scores in fp32, which reads and writes each hidden state once.

`router_gating_naive` defines it. Megatron casts the hidden states to fp32, computes both
gradients by products in TF32, and casts one back: five passes over tensors of `[tokens, hidden]`.
Here products have the precision of fp32, and results repeat to the bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cppmega.ops.common.dispatch import has_triton

MOST_EXPERTS = 128
"""The largest number of experts whose sums, for some columns, a program holds in registers."""


def obstacle(inp: Tensor, weight: Tensor, given: Tensor) -> str | None:
    """Why the kernel does not support a call on a GPU, as a clause; None if it does."""
    if not has_triton():
        return "triton is not installed"
    if inp.dtype not in (torch.bfloat16, torch.float16) or given.dtype != torch.float32:
        return f"scores of {inp.dtype} have gradients of {given.dtype}"
    if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"the router's weight is {weight.dtype}"
    if weight.size(0) > MOST_EXPERTS:
        return f"there are more than {MOST_EXPERTS} experts"
    return None


def gradients(inp: Tensor, weight: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `router_gating_naive.gradients` with the kernel.

    Args:
        inp: `[tokens, hidden]`, bf16 or fp16.
        weight: `[experts, hidden]`, bf16, fp16 or fp32.
        given: fp32 `[tokens, experts]`, the gradient of the scores.

    Returns:
        Those of `inp` and `weight`, in their types.
    """
    from cppmega.ops.pointwise import router_gating_triton as kernels

    inp, weight, given = (each.contiguous() for each in (inp, weight, given))
    of_inp = torch.empty_like(inp)
    parts = given.new_empty(kernels.splits(len(inp)), *weight.shape)
    kernels.gradients(inp, weight, given, of_inp, parts)
    return of_inp, parts.sum(0).to(weight.dtype)
