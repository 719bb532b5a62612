"""`router_gating_naive.gradients`: both gradients in one pass over the hidden states.

Grid: blocks of columns x parts of the tokens. A program holds its columns of the weight and of the
weight's gradient, `[EXPERTS, COLUMNS]` in fp32 each, and walks along its tokens. Each hidden state
is read once and its gradient written once; the gradient of the scores is read once per block of
columns, and the partial gradients of the weight are written once and added in a fixed order. Each
product is three of TF32, which together have the precision of fp32.

Products with few experts do little arithmetic per hidden state: memory bandwidth limits the pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cppmega.ops.common.launch import on_its_device

TOKENS = 64
"""Tokens per step of a program."""

SUMS = 2048
"""Elements of the weight's gradient that a program holds: 128 columns of 16 experts."""

PART = 1024
"""Approximate number of tokens per part: 32 programs per part make several per SM."""


def splits(tokens: int) -> int:
    """The number of parts into which the tokens are divided."""
    return max(1, -(-tokens // PART))


@on_its_device
@triton.jit
def _gradients_kernel(
    inp, weight, do, dx_ptr, parts, tokens, hidden, each,
    E: tl.constexpr, EXPERTS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    expert = tl.arange(0, EXPERTS)
    mask_w = (expert < E)[:, None] & (column < hidden)[None, :]
    offs_w = expert[:, None] * hidden + column[None, :]
    w = tl.load(weight + offs_w, mask=mask_w, other=0.0).to(tl.float32)
    dw = tl.zeros((EXPERTS, COLUMNS), tl.float32)
    first = tl.program_id(1) * each
    for start in range(first, tl.minimum(first + each, tokens), TOKENS):
        token = start + tl.arange(0, TOKENS)
        mask_t = (token < first + each) & (token < tokens)
        g = tl.load(
            do + token[:, None] * E + expert[None, :],
            mask=mask_t[:, None] & (expert < E)[None, :],
            other=0.0,
        )
        offs = token.to(tl.int64)[:, None] * hidden + column[None, :]
        mask = mask_t[:, None] & (column < hidden)[None, :]
        x = tl.load(inp + offs, mask=mask, other=0.0)
        dx = tl.dot(g, w, input_precision="tf32x3")
        tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        dw += tl.dot(tl.trans(g), x.to(tl.float32), input_precision="tf32x3")
    p_part = parts + tl.program_id(1).to(tl.int64) * E * hidden
    tl.store(p_part + offs_w, dw, mask=mask_w)


@torch.library.custom_op("cppmega::router_gating_gradients", mutates_args=("of_inp", "parts"))
def gradients(inp: Tensor, weight: Tensor, given: Tensor, of_inp: Tensor, parts: Tensor) -> None:
    """Write the gradient of `inp`, and the sums of the weight's over each part of the tokens.

    Args:
        inp: `[tokens, hidden]`.
        weight: `[experts, hidden]`.
        given: fp32 `[tokens, experts]`.
        of_inp: `[tokens, hidden]`, of the type of `inp`.
        parts: fp32 `[splits(tokens), experts, hidden]`.
    """
    tokens, hidden = inp.shape
    experts = max(16, triton.next_power_of_2(len(weight)))
    columns = max(16, SUMS // experts)
    each = triton.cdiv(triton.cdiv(tokens, len(parts)), TOKENS) * TOKENS
    _gradients_kernel[(triton.cdiv(hidden, columns), len(parts))](
        inp, weight, given, of_inp, parts, tokens, hidden, each, E=len(weight),
        EXPERTS=experts, TOKENS=TOKENS, COLUMNS=columns, num_warps=4, num_stages=2,
    )  # fmt: skip
