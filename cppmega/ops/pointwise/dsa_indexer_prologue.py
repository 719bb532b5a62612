"""What DSA's indexer computes between its projections and its scores, in one kernel per direction.

This is the rotary embedding of a part of q and k, the Hadamard transform of both, and the scales of
the head weights. Megatron 0.19 launches 50 kernels for it in a forward and backward, and for packed
documents it loops over the documents and waits for the GPU (16 documents: 786 kernels).

Each element is read once, computed in fp32, and rounded once; Megatron rounds cos, sin, every
product and the sum to bf16. The position, document and context-parallel rank of a row are
determined in the kernel, so the host never waits. There are 3 launches in the forward (cos, sin,
the kernel) and 3 in the backward, for any batch, length and number of documents. The backward
accepts strided gradients without a copy.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cppmega.ops.common.numerics import wide
from cppmega.ops.common.once_differentiable import once_differentiable
from cppmega.ops.pointwise import dsa_indexer_prologue_naive as reference

Inputs = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """The rotary embedding of one call.

    Attributes:
        angles: `[positions, 1, 1, width]`, as Megatron's `rotary_pos_emb` returns them; one per
            column, so that both columns of a pair have an angle.
        first: the first rotated column of a head: 0 in 0.19, the head's width minus that of the
            angles up to 0.18.
        mscale: YaRN's factor.
        gathered: the even columns precede the odd ones in the result
            (`dsa_indexer_rope_interleaved`; up to 0.18 `multi_latent_attention`).
        adjacent: columns 2i and 2i + 1 are a pair (`rotary_interleaved`), not i and i + width / 2.
        documents: `cu_seqlens` of the packed documents of q and of k, each of which restarts the
            positions. As in Megatron, if there are as many angles as rows, positions are global.
        ranks: the number of context-parallel ranks, which split each packed document, and this
            rank's number. The angles of unpacked rows are already those of this rank.
    """

    angles: Tensor
    first: int = 0
    mscale: float = 1.0
    gathered: bool = False
    adjacent: bool = False
    documents: tuple[Tensor, Tensor] | None = None
    ranks: tuple[int, int] = (1, 0)


def obstacle(q: Tensor, k: Tensor, weights: Tensor, rotary: Rotary) -> str | None:
    """Why the kernel does not support a call; None if it does."""
    if q.device.type != "cuda":
        return f"the tensors are on {q.device.type}"
    types = {q.dtype, k.dtype, weights.dtype}
    if not types <= {torch.bfloat16, torch.float16, torch.float32}:
        return f"the tensors are {', '.join(sorted(map(str, types)))}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not q.size(2):
        return "there are no heads"
    width = rotary.angles.size(-1)
    if width & (width - 1) or width < 2 or rotary.first % width:
        return f"{width} rotated columns from {rotary.first}: not a power of two and its multiple"
    return None


def prepare_index_inputs(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    rotary: Rotary,
    *,
    hadamard: bool = True,
    scale: float | None = None,
) -> Inputs:
    """Compute the q, k and head weights of the index scores, with gradients.

    Args:
        q: `[s, b, heads, d]`, output of the projection.
        k: `[s, b, d]`, output of the norm.
        weights: `[s, b, heads]`, output of the projection.
        rotary: embedding of q and k.
        hadamard: transform q and k by the Hadamard matrix over sqrt(d); d is a power of two.
        scale: factor on the weights; (heads * d) ** -0.5 if omitted.

    Returns:
        The three tensors in their types, contiguous.

    Raises:
        ValueError: the shapes do not match, or d is not a power of two for `hadamard`.
    """
    _validate(q, k, weights, rotary, hadamard)
    scale = max(q.size(-2) * q.size(-1), 1) ** -0.5 if scale is None else scale
    if obstacle(q, k, weights, rotary) is None:
        out: Inputs = _Prepare.apply(q, k, weights, rotary, hadamard, scale)
        return out
    many, one = rotary.documents or (None, None)
    return (
        reference.rotated(q, rotary, many, hadamard),
        reference.rotated(k, rotary, one, hadamard),
        (wide(weights) * scale).to(weights.dtype),
    )


def _validate(q: Tensor, k: Tensor, weights: Tensor, rotary: Rotary, hadamard: bool) -> None:
    *rows, heads, d = q.shape
    if k.shape != (*rows, d) or weights.shape != (*rows, heads):
        raise ValueError(f"k {tuple(k.shape)} and weights {tuple(weights.shape)} of another q")
    length, width = rotary.angles.size(0), rotary.angles.size(-1)
    if rotary.angles.numel() != length * width or not 0 <= rotary.first <= d - width:
        raise ValueError(f"angles {tuple(rotary.angles.shape)} for {d} columns")
    if rotary.documents is None and length < rows[0]:
        raise ValueError(f"angles for {length} positions and {rows[0]} rows")
    if hadamard and d & (d - 1):
        raise ValueError(f"the last dimension must be a power of two, got {d}")


class _Prepare(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        weights: Tensor,
        rotary: Rotary,
        hadamard: bool,
        scale: float,
    ) -> Inputs:
        from cppmega.ops.pointwise import dsa_indexer_prologue_triton as kernels

        # Keep the angles, which all layers share, instead of their cos and sin.
        ctx.how = (rotary, hadamard, scale)
        return kernels.turn(q, k, weights, *ctx.how, backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dw: Tensor) -> tuple[Any, ...]:
        from cppmega.ops.pointwise import dsa_indexer_prologue_triton as kernels

        return (*kernels.turn(dq, dk, dw, *ctx.how, backward=True), None, None, None)
