"""Rounding without a direction: of the tensor core's sums, and of what the kernels store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from cppmega.ops.mhc import parts_triton as in_parts
from cppmega.ops.mhc import projection_triton as projections
from cppmega.ops.mhc import streams_gradient_triton as streams_gradients
from tests.ops.mhc.checks import (
    NAMES,
    Shape,
    both_ways,
    cast,
    drawn,
    fused_ops,
    plain_site,
    upstream_of,
)

SHARED = 2.5e-7
"""Most that all products may be too small or too large by, together, of their size.

Emulated: -2e-7 of TF32, whose step of 64 is cut off 8 times, and -1e-7 of bf16; -7e-7 where four
steps share an accumulator.
"""


def _towards_zero(exact: Any) -> Any:
    """fp64 cut off to fp32."""
    near = exact.astype(np.float32)
    return np.where(np.abs(near) > np.abs(exact), np.nextafter(near, np.float32(0)), near)


@contextmanager
def truncating() -> Iterator[None]:
    """Let the interpreter's products be a tensor core's, and one program sum up everything.

    Hopper adds 16 products of bf16, or 8 of TF32, and its accumulator exactly, and cuts the sum off
    to fp32. Triton adds three terms of TF32 from zero, and the accumulator that it is given to
    their sum.
    """
    from triton._C.libtriton import ir
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def dot(_: Any, a: Any, b: Any, given: Any, precision: Any, __: Any) -> Any:
        fresh = precision == ir.INPUT_PRECISION.TF32x3
        left, right = a.data.astype(np.float64), b.data.astype(np.float64)
        sums = np.zeros_like(given.data) if fresh else given.data
        for k in range(0, left.shape[1], 8 if fresh else 16):
            some = slice(k, k + (8 if fresh else 16))
            sums = _towards_zero(sums + left[:, some] @ right[some])
        return TensorHandle(sums + given.data if fresh else sums, given.dtype.scalar)

    with (
        mock.patch.object(InterpreterBuilder, "create_dot", dot),
        mock.patch.object(projections, "PROGRAMS", 1),
        mock.patch.object(streams_gradients, "RANGES", 1),
    ):
        yield


def check_sums(shape: Shape, dtype: torch.dtype, device: str = "cpu") -> None:
    """The products with phi, and phi's gradient, are not all too small by one factor.

    The gradient of a scale is a sum over all tokens of products with phi: what these have in common
    stays in it, while their own errors cancel.
    """
    given = drawn(shape, dtype, device=device)
    s, b, n, c = shape
    like: dict[str, Any] = {"dtype": torch.float32, "device": device}
    tokens, phi = given.streams.reshape(s * b, n, c), given.parameters.phi
    parts = torch.empty(
        projections.split(s * b, n, c, dtype)[0], s * b, projections.padded(n), **like
    )
    factor = in_parts.factor(phi, dtype)
    projections.projection(tokens, factor, parts)
    x = tokens.double().flatten(1)
    assert abs(_shared(parts.sum(0)[:, : len(phi)], x @ phi.double().t())) < SHARED
    d_values = torch.randn(s * b, projections.padded(n), generator=torch.Generator().manual_seed(3))
    d_values = d_values.to(device)
    d_parts = in_parts.factor(d_values, dtype)
    parts = torch.empty(streams_gradients.ranges(s * b, n, dtype)[0], *phi.shape, **like)
    streams_gradients.streams_gradient(
        tokens, factor, d_values, d_parts, None, None, torch.empty_like(tokens), parts, False
    )
    exact = d_values[:, : len(phi)].double().t() @ x
    assert abs(_shared(parts.sum(0), exact)) < SHARED


def _shared(found: Tensor, exact: Tensor) -> float:
    """The factor, less 1, that is common to all values."""
    return float(((found.double() - exact) * exact.sign()).sum() / exact.abs().sum())


def check_signs(shape: Shape, dtype: torch.dtype, device: str = "cpu") -> None:
    """What is stored is above the exact value as often as below, and as often nearer to zero.

    Of update, aggregation and their gradients, within 5 standard deviations. The interpreter cuts
    off to bf16, so that it can only be asked about fp16.
    """
    given = drawn(shape, dtype, device=device)
    upstream = upstream_of(given)
    wide = [x.double() for x in upstream]
    exact = both_ways(plain_site, cast(given, torch.float64), wide, 3)
    found = both_ways(fused_ops, given, upstream, 3)
    for name, mine, want in zip(NAMES, found, exact, strict=True):
        if mine.numel() < given.out.numel() or name == "of phi":
            continue
        sign = (mine.double() - want).sign()
        bound = 5 * float(sign.abs().sum()) ** 0.5
        assert bound > 0, name
        assert abs(float(sign.sum())) < bound, name
        assert abs(float((sign * want.sign()).sum())) < bound, name
