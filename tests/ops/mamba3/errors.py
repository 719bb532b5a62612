"""Errors of Mamba-3's kernels against plain torch in fp64, and those of plain torch in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cppmega.ops.mamba3 import naive as reference
from cppmega.ops.mamba3.naive import Definition, Inputs, Parameters
from tests.ops.mamba3.checks import Shape, drawn, leaves
from tests.ops.mamba3.operands_checks import of_a_projection

UPSTREAM = 8
"""Gradients of the output for each of which errors are measured.

An error of the 16 values of a gradient by head is too much a matter of chance.
"""
Named = dict[str, Tensor]
Mix = Callable[[Inputs, Parameters, Definition, Tensor | None], Tensor]
"""Computes the output from inputs, parameters, the definition of A, and a pack's boundaries."""

WIDE = Shape(2, 4096, 16, 8, 4, 128, 64)
ON_GPU: dict[str, tuple[Shape, list[int] | None, float]] = {
    "long": (WIDE, None, 0.0),
    "one token": (WIDE._replace(length=1), None, 0.0),
    "15 tokens": (WIDE._replace(length=15), None, 0.0),
    "17 tokens": (WIDE._replace(length=17), None, 0.0),
    "small dt": (WIDE._replace(length=100), None, -8.0),
    "large dt": (WIDE._replace(length=100), None, 6.0),
    "one group": (WIDE._replace(length=100, groups=1), None, 0.0),
    "groups are heads": (WIDE._replace(length=100, groups=16), None, 0.0),
    "packed": (WIDE._replace(batch=1, length=300), [0, 1, 16, 117, 300], 0.0),
}
"""Shapes of rank 4, boundaries of a pack, and the mean of dt before its softplus."""


def given_for(
    shape: Shape, dtype: torch.dtype, dt: float = 0.0, device: str = "cpu"
) -> tuple[Inputs, Parameters]:
    """Inputs, which are slices of one projection, and parameters; all require gradients."""
    drawn_inputs, drawn_parameters = drawn(shape, dtype, device, dt=dt)
    inputs = Inputs(*(each.detach().requires_grad_() for each in of_a_projection(drawn_inputs)))
    return inputs, drawn_parameters


def results(out: Tensor, inputs: Inputs, parameters: Parameters, upstream: Tensor) -> Named:
    """The output, and the gradients of everything for each upstream gradient, by name."""
    named = leaves(inputs, parameters)
    each = [
        torch.autograd.grad(out, [*named.values()], one.to(out.dtype), retain_graph=True)
        for one in upstream
    ]
    found = map(torch.stack, zip(*each, strict=True))
    return {"out": out.detach(), **dict(zip(named, found, strict=True))}


def by_kernels(
    mix: Mix,
    inputs: Inputs,
    parameters: Parameters,
    upstream: Tensor,
    definition: Definition,
    bounds: list[int] | None,
) -> Named:
    device = inputs.x.device
    boundaries = None if bounds is None else torch.tensor(bounds, dtype=torch.int32, device=device)
    return results(mix(inputs, parameters, definition, boundaries), inputs, parameters, upstream)


def plain(
    inputs: Inputs,
    parameters: Parameters,
    upstream: Tensor,
    definition: Definition,
    bounds: list[int] | None,
    kind: torch.dtype,
    products: torch.dtype | None = None,
) -> Named:
    """The same in plain torch in the type `kind`, with matrix products in the type `products`."""

    def of(each: Any) -> Any:
        named = {
            name: x if x is None else x.detach().to(kind).requires_grad_()
            for name, x in each._asdict().items()
        }
        return type(each)(**named)

    inputs, parameters = of(inputs), of(parameters)
    device = inputs.x.device.type
    with torch.autocast(device, products or torch.bfloat16, enabled=products is not None):
        out = reference.mixed(inputs, parameters, definition, bounds, chunk=16)
    return results(out, inputs, parameters, upstream)


class Error(NamedTuple):
    """L2 norms for one result, of a gradient for all upstream gradients together.

    Attributes:
        ours: of its error.
        plain: of the error of plain torch in fp32, rounded to the type of the result.
        size: of the exact result; 0 for a zero gradient, such as that of A for a single token.
    """

    ours: float
    plain: float
    size: float


def errors(
    mix: Mix,
    shape: Shape,
    dtype: torch.dtype,
    definition: Definition = "softplus",
    bounds: list[int] | None = None,
    dt: float = 0.0,
    device: str = "cpu",
    products: torch.dtype | None = None,
) -> dict[str, Error]:
    """Errors of the output and of all gradients; asserts that they are finite and repeatable.

    Args:
        mix: the implementation under test.
        shape: of the inputs.
        dtype: of the inputs.
        definition: of A.
        bounds: of a pack.
        dt: mean of dt before its softplus.
        device: of all tensors.
        products: the type in which plain torch multiplies matrices, by autocast; None: fp32.
    """
    inputs, parameters = given_for(shape, dtype, dt, device)
    generator = torch.Generator(device).manual_seed(5)
    count = 1 if device == "cpu" else UPSTREAM  # the interpreter is slow
    size = (count, *inputs.x.shape)
    upstream = torch.randn(size, generator=generator, dtype=torch.float64, device=device).to(dtype)
    given = (inputs, parameters, upstream, definition, bounds)
    found = by_kernels(mix, *given)
    again = found if device == "cpu" else by_kernels(mix, *given)  # the interpreter has one thread
    exact, rough = plain(*given, torch.float64), plain(*given, torch.float32, products)
    measured = {}
    for name, want in exact.items():
        got = found[name]
        assert torch.equal(got, again[name]), f"{name} does not repeat"
        assert got.shape == want.shape and torch.isfinite(got).all(), name
        of_plain = rough[name].to(got.dtype).double() - want
        measured[name] = Error(*(float(x.norm()) for x in (got.double() - want, of_plain, want)))
    return measured
