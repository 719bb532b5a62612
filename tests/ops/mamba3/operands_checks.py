"""The kernels of Mamba-3's operands against their plain form in fp64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cppmega.ops.mamba3 import operands
from cppmega.ops.mamba3.naive import Definition, Inputs, Parameters
from tests.ops.mamba3.checks import Shape, drawn

READ = operands.Gradients._fields


def of_a_projection(inputs: Inputs) -> Inputs:
    """The same values as slices of one tensor `[l, b, width]`, as in a mixer."""
    whole = torch.cat([each.detach().flatten(2) for each in inputs], -1)
    whole = whole.transpose(0, 1).contiguous().transpose(0, 1)
    parts = whole.split([each.flatten(2).size(-1) for each in inputs], -1)
    return Inputs(
        *(part.unflatten(-1, each.shape[2:]) for part, each in zip(parts, inputs, strict=True))
    )


def exact(
    inputs: Inputs, parameters: Parameters, definition: Definition, given: list[Tensor], kind: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """Results and gradients of the plain form in the type `kind`."""
    inputs = Inputs(*(each.detach().to(kind).requires_grad_() for each in inputs))
    learned = {
        name: each if each is None else each.detach().to(kind).requires_grad_()
        for name, each in parameters._asdict().items()
    }
    found = operands.plain(inputs, Parameters(**learned), definition)
    leaves = {**inputs._asdict(), **learned}
    outer = [each.to(made.dtype) for each, made in zip(given, found, strict=True)]
    gradients = torch.autograd.grad(found, [leaves[name] for name in READ], outer)
    return [each.detach() for each in found], list(gradients)


def check(
    shape: Shape,
    dtype: torch.dtype,
    definition: Definition = "softplus",
    dt: float = 0.0,
    device: str = "cpu",
    decay: float = 0.0,
) -> None:
    """Errors are at most 1.5 times those of the plain form in fp32, rounded to the same types.

    `dt` and `decay` are added to the values that have these names.
    """
    drawn_inputs, parameters = drawn(shape, dtype, device, dt=dt)
    raw = drawn_inputs.decay.detach() + decay
    raw[:, :1, 0] = 0  # where the halves of the heavy tail meet
    drawn_inputs = drawn_inputs._replace(decay=raw)
    inputs = of_a_projection(drawn_inputs)
    found = operands.compute(inputs, parameters, definition)
    given = [torch.randn_like(each) for each in found]
    turned = [each.transpose(-1, -2).contiguous().transpose(-1, -2) for each in given]
    mine = operands.gradients(inputs, parameters, definition, operands.Operands(*turned))
    again = operands.gradients(inputs, parameters, definition, operands.Operands(*given))
    for name, one, other in zip(READ, mine, again, strict=True):
        assert torch.equal(one, other), f"{name} differs between two runs"
    wide, low = (
        exact(inputs, parameters, definition, given, kind)
        for kind in (torch.float64, torch.float32)
    )
    for names, results, want, rough in (
        (operands.Operands._fields, found, wide[0], low[0]),
        (READ, mine, wide[1], low[1]),
    ):
        for name, result, right, single in zip(names, results, want, rough, strict=True):
            assert result.shape == right.shape and torch.isfinite(result).all(), name
            error = (result.double() - right).norm()
            floor = (single.to(result.dtype).double() - right).norm()
            bound = 1.5 * floor + 4e-7 * right.norm()
            assert error <= bound, (name, shape, dtype, float(error), float(floor))
