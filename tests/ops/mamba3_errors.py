"""Errors of Mamba-3's kernels: against plain torch in fp64, and as products of matrices round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cppmega.ops import mamba3_reference as reference
from cppmega.ops.mamba3_reference import Definition, Inputs, Parameters
from tests.ops.mamba3_checks import Shape, drawn, leaves
from tests.ops.mamba3_operands_checks import of_a_projection

Named = dict[str, Tensor]
Mix = Callable[[Inputs, Parameters, Definition, Tensor | None], Tensor]
"""Inputs, parameters, the definition of A and the boundaries of a pack to the output."""


def given_for(
    shape: Shape, dtype: torch.dtype, dt: float = 0.0, device: str = "cpu"
) -> tuple[Inputs, Parameters]:
    """Leaves that require gradients; the inputs are parts of one projection."""
    drawn_inputs, drawn_parameters = drawn(shape, dtype, device, dt=dt)
    inputs = Inputs(*(each.detach().requires_grad_() for each in of_a_projection(drawn_inputs)))
    return inputs, drawn_parameters


def results(out: Tensor, inputs: Inputs, parameters: Parameters, upstream: Tensor) -> Named:
    """The output and the gradients of everything, by name."""
    named = leaves(inputs, parameters)
    found = torch.autograd.grad(out, [*named.values()], upstream.to(out.dtype))
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
    """The same in a type, its matrix products in another."""

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


def check(
    mix: Mix,
    shape: Shape,
    dtype: torch.dtype,
    definition: Definition = "softplus",
    bounds: list[int] | None = None,
    dt: float = 0.0,
    device: str = "cpu",
) -> None:
    """Check errors and repeats.

    An error is at most 1.5 times that of plain torch whose matrix products are in the type of the
    inputs, by autocast, or of one rounding to that type, which counts for gradients of few numbers.
    With inputs in fp32, which are rounded nowhere, it is at most 1e-5 of the result.
    """
    inputs, parameters = given_for(shape, dtype, dt, device)
    upstream = torch.randn(inputs.x.shape, dtype=torch.float64, device=device).to(dtype)
    given = (inputs, parameters, upstream, definition, bounds)
    found = by_kernels(mix, *given)
    again = found if device == "cpu" else by_kernels(mix, *given)  # the interpreter has one thread
    exact = plain(*given, torch.float64)
    rounded = None if dtype == torch.float32 else plain(*given, torch.float32, dtype)
    for name, want in exact.items():
        got = found[name]
        assert torch.equal(got, again[name]), f"{name} does not repeat"
        assert got.shape == want.shape and torch.isfinite(got).all(), name
        error = float((got.double() - want).norm() / want.norm())
        most = 1e-5
        if rounded is not None:
            rough = rounded[name].to(got.dtype).double()
            error_of_rough = float((rough - want).norm() / want.norm())
            most = 1.5 * max(error_of_rough, torch.finfo(dtype).eps / 2)
        assert error <= most, f"{name} of {shape}, {dtype}: {error:.2e}, at most {most:.2e}"
