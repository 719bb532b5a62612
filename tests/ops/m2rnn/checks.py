"""Checks of the kernels of M2RNN and of its convolution, for the interpreter and for a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from cppmega.ops import m2rnn, packed_conv
from cppmega.ops.m2rnn import naive as m2rnn_reference
from cppmega.ops.packed_conv import naive as packed_conv_reference

Op = Callable[..., Tensor]
RECURRENCE = (m2rnn.m2rnn, m2rnn_reference.m2rnn)
CONVOLUTION = (packed_conv.packed_conv, packed_conv_reference.packed_conv)
"""A kernel's op, and its definition."""


class Shape(NamedTuple):
    """Sequence, batch, heads, and the rows and columns of a state."""

    s: int
    b: int
    heads: int
    k: int
    v: int


def normal(seed: int, *size: int) -> Tensor:
    """Numbers that are the same on every device."""
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def drawn(shape: Shape, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """What the recurrence takes; q, k and v in `dtype`, from one tensor as in the mixer.

    One head keeps its state to a part in ten million, one loses it at once, and the others are
    in between.
    """
    s, b, heads, k, v = shape
    joined = normal(1, s, b, 2 * k + heads * v).to(device, dtype)
    query, key, value = joined.split((k, k, heads * v), dim=-1)
    decay = -2 * torch.rand(s, b, heads, generator=torch.Generator().manual_seed(2))
    decay[..., :1], decay[..., -1:] = -1e-7, -200.0
    # So small that a gradient neither grows from step to step nor magnifies the rounding of others.
    transition = torch.eye(v) + normal(3, heads, v, v) * (0.2 / max(v, 1) ** 0.5)
    return [
        query,
        key,
        value.unflatten(-1, (heads, v)),
        transition.to(device, dtype),
        decay.to(device),
    ]


def drawn_conv(
    s: int, b: int, c: int, taps: int, dtype: torch.dtype, device: str = "cpu"
) -> list[Tensor]:
    """What the convolution takes; x is a slice of columns."""
    x = normal(4, s, b, c + 5).to(device, dtype)[..., :c]
    return [x, normal(5, c, taps).to(device, dtype), normal(6, c).to(device, dtype)]


def both_ways(op: Op, given: Sequence[Tensor], bounds: Tensor | None) -> list[Tensor]:
    """The result, and the gradients under an upstream one that is unequal and not contiguous."""
    leaves = [x.detach().requires_grad_() for x in given]
    out = op(*leaves, bounds)
    upstream = normal(7, *out.transpose(0, 1).shape).transpose(0, 1) + 0.25
    # Rounded, as a kernel in a low type gets it.
    low = upstream.to(given[0].device, torch.bfloat16).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, low)]


def check(
    ops: tuple[Op, Op],
    given: Sequence[Tensor],
    documents: Sequence[int] | None = None,
    slack: float = 1.5,
) -> list[Tensor]:
    """Result and gradients against fp64: errors of at most `slack` times those of fp32, rounded.

    They are rounded to the type of the inputs, also the gradient of the decay, which is fp32. A
    small part of the error of fp32 is chance where there are few values: 4e-7 of the norm are
    allowed besides.
    """
    device = given[0].device
    bounds = None if documents is None else torch.tensor(documents, dtype=torch.int32).to(device)
    found = both_ways(ops[0], given, bounds)
    wide = [
        both_ways(ops[1], [x.to(kind) for x in given], bounds)
        for kind in (torch.float64, torch.float32)
    ]
    for number, (mine, exact, low) in enumerate(zip(found, *wide, strict=True)):
        assert torch.isfinite(mine).all(), number
        error = (mine.double() - exact).norm()
        floor = (low.to(given[0].dtype).double() - exact).norm()
        assert error <= slack * floor + 4e-7 * exact.norm(), (number, documents, error, floor)
    return found


def check_clipping(dtype: torch.dtype, device: str = "cpu") -> None:
    """States' gradients are clipped as defined: some, none, and such as would overflow.

    These are of transitions so large that every step multiplies a gradient by 9,000, with states of
    zero, where tanh is steepest.
    """
    for shape, documents, bound in (
        (Shape(6, 1, 2, 20, 16), (0, 1, 1, 6), 0.3),
        (Shape(3, 1, 1, 5, 3), None, 1e4),
    ):
        given = drawn(shape, dtype, device)
        found = check(_clipped(bound), given, documents)
        bounds = None if documents is None else torch.tensor(documents, device=device)
        free = both_ways(m2rnn.m2rnn, given, bounds)
        same = [torch.equal(a, b) for a, b in zip(found, free, strict=True)]
        assert same == [True, True, *[bound == 1e4] * 4], "the output, and the gradient of q"
    q, k, v, transition, decay = drawn(Shape(12, 1, 1, 5, 3), dtype, device)
    grown = [q, k * 0, v, transition * 0 + 1e4 * torch.eye(3).to(transition), decay * 0 - 2.3]
    assert not torch.isfinite(both_ways(m2rnn.m2rnn, grown, None)[2]).all()
    check(_clipped(1.0), grown)
    leaf = k.detach().requires_grad_()
    out = m2rnn.m2rnn(q, leaf, v, transition, decay, None, 1.0)
    (of_k,) = torch.autograd.grad(out, leaf, torch.full_like(out, torch.nan))
    assert of_k.isnan().all()


def _clipped(bound: float) -> tuple[Op, Op]:
    kernel, definition = (partial(op, gradient_clipping=bound) for op in RECURRENCE)
    return kernel, definition


def check_repeats(ops: tuple[Op, Op], given: Sequence[Tensor], documents: Sequence[int]) -> None:
    """The bits are the same in every run."""
    bounds = torch.tensor(documents, dtype=torch.int32).to(given[0].device)
    first = both_ways(ops[0], given, bounds)
    for _ in range(2):
        again = both_ways(ops[0], given, bounds)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def check_parts(given: Sequence[Tensor], documents: Sequence[int]) -> None:
    """A document's result has the bits that it has alone."""
    bounds = torch.tensor(documents, dtype=torch.int32).to(given[0].device)
    whole = m2rnn.m2rnn(*given, bounds)
    q, k, v, transition, decay = given
    for start, end in itertools.pairwise(documents):
        part = slice(start, end)
        alone = m2rnn.m2rnn(q[part], k[part], v[part], transition, decay[part])
        assert torch.equal(whole[part], alone)


def check_empty(way: int, dtype: torch.dtype, device: str) -> None:
    """Without any element of some dimension, results and gradients are zeros or empty.

    Args:
        way: 0 for the kernels, 1 for the definitions.
        dtype: the type of the inputs.
        device: where they are.
    """
    for op, given, documents in (
        *((RECURRENCE[way], drawn(Shape(0, b, 2, 5, 3), dtype, device), None) for b in (1, 2)),
        (RECURRENCE[way], drawn(Shape(0, 1, 2, 5, 3), dtype, device), (0, 0)),
        (RECURRENCE[way], drawn(Shape(3, 0, 2, 5, 3), dtype, device), None),
        (RECURRENCE[way], drawn(Shape(3, 1, 0, 5, 3), dtype, device), (0, 3)),
        (RECURRENCE[way], drawn(Shape(3, 2, 2, 0, 3), dtype, device), None),
        (RECURRENCE[way], drawn(Shape(3, 2, 2, 5, 0), dtype, device), None),
        *((CONVOLUTION[way], drawn_conv(0, b, 3, 2, dtype, device), None) for b in (1, 2)),
        (CONVOLUTION[way], drawn_conv(0, 1, 3, 2, dtype, device), (0, 0)),
        (CONVOLUTION[way], drawn_conv(3, 0, 3, 2, dtype, device), None),
        (CONVOLUTION[way], drawn_conv(3, 1, 0, 2, dtype, device), (0, 3)),
    ):
        bounds = None if documents is None else torch.tensor(documents, device=device)
        of = given[2] if len(given) == 5 else given[0]
        for mine, x in zip(both_ways(op, given, bounds), (of, *given), strict=True):
            assert mine.shape == x.shape and mine.dtype == x.dtype and not mine.any()
