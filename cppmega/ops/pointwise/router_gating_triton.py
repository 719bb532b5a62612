"""`router_gating_naive.gradients`: both gradients of a part of the tokens in one pass.

A program has some columns of the hidden states. It walks along its part of the tokens, writes their
gradients, and keeps the sum of the weight's. Each product is three of TF32, which together have the
precision of fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cppmega.ops.common.launch import on_its_device

TOKENS = 64
"""Tokens that a program takes at a time."""

SUMS = 2048
"""Sums of the weight's gradient that a program holds: 128 columns of 16 experts."""

PART = 1024
"""Tokens of a program, about: 32 programs per part make several per multiprocessor."""


def splits(tokens: int) -> int:
    """Into how many parts the tokens are divided."""
    return max(1, -(-tokens // PART))


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def _gradients_kernel(  # type: ignore[no-untyped-def]
    inp, weight, given, of_inp, parts, tokens, hidden, each,
    E: tl.constexpr, EXPERTS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    expert = tl.arange(0, EXPERTS)
    has_weight = (expert < E)[:, None] & (column < hidden)[None, :]
    of_expert = expert[:, None] * hidden + column[None, :]
    w = tl.load(weight + of_expert, mask=has_weight, other=0.0).to(tl.float32)
    sums = tl.zeros((EXPERTS, COLUMNS), tl.float32)
    first = tl.program_id(1) * each
    for start in range(first, tl.minimum(first + each, tokens), TOKENS):
        token = start + tl.arange(0, TOKENS)
        own = (token < first + each) & (token < tokens)
        g = tl.load(
            given + token[:, None] * E + expert[None, :],
            mask=own[:, None] & (expert < E)[None, :],
            other=0.0,
        )
        at = token.to(tl.int64)[:, None] * hidden + column[None, :]
        has = own[:, None] & (column < hidden)[None, :]
        x = tl.load(inp + at, mask=has, other=0.0)
        d_x = tl.dot(g, w, input_precision="tf32x3")
        tl.store(of_inp + at, d_x.to(of_inp.dtype.element_ty), mask=has)
        sums += tl.dot(tl.trans(g), x.to(tl.float32), input_precision="tf32x3")
    part = parts + tl.program_id(1).to(tl.int64) * E * hidden
    tl.store(part + of_expert, sums, mask=has_weight)


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
