"""The recurrence of M2RNN: non-linear, with matrix-valued states, serial in time.

`naive` defines it; the results are the same, computed in fp32 and rounded once. They are
bitwise reproducible, including gradients.

Programs of one warp iterate over time with 32 rows of a state each in registers, those of one head
in one sequence or document. The backward needs, in bytes, with the constants of the kernels:

- saved: `4 * K * V * heads * tokens / 64`, the states at every 64th step;
- during the backward: at most `4 * K * V * heads * 64 * 16` for the states in between, and
  `8 * K * heads * tokens` for each head's contribution to the gradients of q and k.

A head of more than 32 rows needs `4 * V * heads * tokens` for every 32 of them besides, for their
contributions to the output, and in the backward to the gradient of v.

On a CPU the reference is used, except in Triton's interpreter. On a GPU there is no fallback: what
the kernels do not support raises `no-kernel` with the reason that `obstacle` returns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cppmega.errors import CppmegaError
from cppmega.ops.common.dispatch import TYPES, kernel_obstacle
from cppmega.ops.common.rows import with_rows
from cppmega.ops.m2rnn import naive as reference

__all__ = ["document_bounds", "m2rnn", "obstacle"]

MOST_KEYS, MOST_VALUES = 128, 64
"""The largest state whose tiles fit registers."""


def obstacle(
    device: torch.device, dtype: torch.dtype, key_dim: int = 1, value_dim: int = 1
) -> str | None:
    """Why the kernels do not support heads of this size, as a clause; None if they do.

    On a CPU they run only in Triton's interpreter.
    """
    if dtype in TYPES and (key_dim > MOST_KEYS or value_dim > MOST_VALUES):
        return (
            f"a state of {key_dim} x {value_dim} is larger than the {MOST_KEYS} x {MOST_VALUES} "
            "that registers hold"
        )
    return kernel_obstacle(device, dtype)


def document_bounds(cu_seqlens: Tensor, length: int) -> Tensor:
    """The bounds of documents that fill a packed sequence, from those of documents that may not.

    Tokens after the last document form one more, which may be empty. Nothing waits for the GPU.

    Args:
        cu_seqlens: `[documents + 1]`, from 0, ascending, of any integer type.
        length: the length of the sequence.

    Returns:
        int32 `[documents + 2]`, from 0 to the length.
    """
    return torch.nn.functional.pad(cu_seqlens.int(), (0, 1), value=length)


def m2rnn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    transition: Tensor,
    log_decay: Tensor,
    bounds: Tensor | None = None,
    gradient_clipping: float | None = None,
) -> Tensor:
    """Compute `naive.m2rnn`.

    Args:
        q: `[s, b, K]`, of the type of v.
        k: `[s, b, K]`, of the type of v.
        v: `[s, b, heads, V]`, bf16, fp16 or fp32.
        transition: `[heads, V, V]`, bf16, fp16 or fp32.
        log_decay: `[s, b, heads]`, fp32, not above 0.
        bounds: `[documents + 1]` as returned by `document_bounds`, with b = 1; None: each of the b
            sequences is one document.
        gradient_clipping: the largest element of a state's gradient, above 0; None: any.

    Returns:
        `[s, b, heads, V]` in the type of v.

    Raises:
        CppmegaError: `no-kernel`.
        ValueError: the shapes do not match, or `gradient_clipping` is not above 0.
    """
    _check_shapes(q, k, v, transition, log_decay, bounds)
    if gradient_clipping is not None and not gradient_clipping > 0:
        raise ValueError(f"gradient_clipping={gradient_clipping} is not above 0")
    why = obstacle(v.device, v.dtype, k.size(-1), v.size(-1))
    if why is not None and v.device.type == "cpu":
        return reference.m2rnn(q, k, v, transition, log_decay, bounds, gradient_clipping)
    if why is None:
        why = _types_obstacle(q, k, v, transition, log_decay)
    if why is not None:
        raise CppmegaError(
            "no-kernel",
            f"No kernel of M2RNN supports this: {why}.",
            "The recurrence in plain torch launches thousands of kernels for a sequence.",
            "change the unsupported property, or call cppmega.ops.m2rnn.naive",
        )
    from cppmega.ops.m2rnn.autograd import Recurrence

    found: Tensor = Recurrence.apply(
        with_rows(q),
        with_rows(k),
        with_rows(v.flatten(-2)).view(v.shape),
        transition.contiguous(),
        log_decay.contiguous(),
        None if bounds is None else bounds.int().contiguous(),
        gradient_clipping,
    )
    return found


def _check_shapes(
    q: Tensor, k: Tensor, v: Tensor, transition: Tensor, log_decay: Tensor, bounds: Tensor | None
) -> None:
    if v.ndim != 4:
        raise ValueError(f"values {tuple(v.shape)} are not [s, b, heads, V]")
    s, b, heads, width = v.shape
    if q.ndim != 3 or q.shape[:2] != (s, b) or k.shape != q.shape:
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} for values {tuple(v.shape)}")
    if transition.shape != (heads, width, width) or log_decay.shape != (s, b, heads):
        raise ValueError(
            f"transition {tuple(transition.shape)} and decay {tuple(log_decay.shape)} for values "
            f"{tuple(v.shape)}"
        )
    if bounds is not None and (b != 1 or bounds.ndim != 1 or len(bounds) < 2):
        raise ValueError(f"bounds {tuple(bounds.shape)} of documents for {b} sequences")


def _types_obstacle(
    q: Tensor, k: Tensor, v: Tensor, transition: Tensor, log_decay: Tensor
) -> str | None:
    """Why the kernels cannot read these types, as a clause; None if they can."""
    if q.dtype != v.dtype or k.dtype != v.dtype:
        return f"q is {q.dtype} and k {k.dtype}, but the values are {v.dtype}"
    if transition.dtype not in TYPES:
        return f"the transition is {transition.dtype}"
    return None if log_decay.dtype == torch.float32 else f"the decay is {log_decay.dtype}, not fp32"
