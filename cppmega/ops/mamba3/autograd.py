"""Autograd of Mamba-3 with the kernels of `mamba3.scan`.

Only the projection is saved: the backward recomputes the operands of the scan and the states.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cppmega.ops.common.once_differentiable import once_differentiable
from cppmega.ops.mamba3 import operands, scan
from cppmega.ops.mamba3.naive import (
    Definition,
    Inputs,
    Parameters,
    halved,
    interleaved,
    without_tokens,
)
from cppmega.ops.mamba3.operands import Operands


def mixed(
    inputs: Inputs, parameters: Parameters, definition: Definition, boundaries: Tensor | None
) -> Tensor:
    """Compute `naive.mixed`, `[b, l, h, p]`, without an output norm.

    Args:
        inputs: of one type, bf16 or fp16 on a GPU; `scan.obstacle` checks the shapes.
        parameters: on the same device; fp32, except for the norms.
        definition: of A.
        boundaries: int32 `[documents + 1]`, cumulative lengths of a pack, for which b is 1; tokens
            after the last one are a document of their own.
    """
    if not inputs.x.numel():
        return without_tokens(inputs, parameters)
    found: Tensor = _Mixed.apply(  # type: ignore[no-untyped-call]
        definition, boundaries, *inputs, *parameters[:-1]
    )
    return found


class _Mixed(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, definition: Definition, boundaries: Tensor | None, *tensors: Any
    ) -> Tensor:
        inputs, parameters = Inputs(*tensors[:8]), Parameters(*tensors[8:])
        ctx.definition, ctx.boundaries = definition, boundaries
        ctx.save_for_backward(*tensors)
        scan_operands = operands.compute(inputs, parameters, definition, spread=False)
        return scan.forward(scan_operands, inputs, _of_scan(parameters, inputs), boundaries)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        tensors: Any = [each if each is None else each.detach() for each in ctx.saved_tensors]
        inputs, parameters = Inputs(*tensors[:8]), Parameters(*tensors[8:])
        scan_operands = operands.compute(inputs, parameters, ctx.definition, spread=False)
        learned = _of_scan(parameters, inputs)
        scan_grads = scan.backward(scan_operands, inputs, learned, ctx.boundaries, gradients[0])
        grads = operands.gradients(
            inputs, parameters, ctx.definition, Operands(*scan_grads[: len(scan_operands)])
        )
        biases = scan_grads.key_bias, scan_grads.query_bias
        ranks: Any = scan_grads.rank_x, scan_grads.rank_z, scan_grads.rank_out
        if parameters.rank_x is None:
            biases, ranks = (interleaved(biases[0]), interleaved(biases[1])), (None, None, None)
        return (
            *(None, None),
            *(scan_grads.z, scan_grads.x, *grads[:6], grads.dt_bias, scan_grads.d),
            *(*biases, grads.key_norm, grads.query_norm, *ranks),
        )


def _of_scan(parameters: Parameters, inputs: Inputs) -> Parameters:
    """The parameters as the scan takes them: SISO is rank 1 with weights of one, and its keys and
    queries, which `operands` reorder as well, are paired in halves."""
    if parameters.rank_x is not None:
        return parameters
    ones = parameters.d.new_ones(inputs.x.size(2), 1, inputs.x.size(3))
    return parameters._replace(
        key_bias=halved(parameters.key_bias), query_bias=halved(parameters.query_bias),
        rank_x=ones, rank_z=ones, rank_out=ones,
    )  # fmt: skip
