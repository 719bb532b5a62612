"""The inputs of Mamba-3's scan other than values and gates, computed from the input projection.

`plain` is the definition, in plain torch, on any device and differentiable. On a GPU, `compute` and
`gradients` take two kernel launches each (`operands_triton`) and read the projection in
place; plain torch needs a dozen, and copies each tensor into the layout that the scan expects.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cppmega.ops.common.dispatch import interpreted
from cppmega.ops.common.numerics import wide
from cppmega.ops.common.once_differentiable import once_differentiable
from cppmega.ops.mamba3 import operands_triton as kernels
from cppmega.ops.mamba3.naive import (
    EPSILON,
    Definition,
    Inputs,
    Parameters,
    decay_rate,
    halved,
)


class Operands(NamedTuple):
    """The inputs of the scan's kernels, apart from the parameters, x and z.

    Attributes:
        queries: `[b, l, R, g, n]`.
        keys: `[b, l, R, g, n]`.
        log_a: `[b, h, l]`, fp32.
        dt: `[b, h, l]`, fp32.
        trap: `[b, h, l]`.
        angles: `[b, l, h, k]`, fp32; for `scan`, those of the inputs, `[b, l, k]`.
    """

    queries: Tensor
    keys: Tensor
    log_a: Tensor
    dt: Tensor
    trap: Tensor
    angles: Tensor


class Gradients(NamedTuple):
    """Gradients of the inputs and parameters from which `Operands` are computed.

    Attributes have the names and shapes of those of `Inputs` and `Parameters`.
    """

    keys: Tensor
    queries: Tensor
    dt: Tensor
    decay: Tensor
    trap: Tensor
    angles: Tensor
    dt_bias: Tensor
    key_norm: Tensor
    query_norm: Tensor


def plain(inputs: Inputs, parameters: Parameters, definition: Definition) -> Operands:
    """The operands in plain torch, in fp64 if x is fp64."""
    heads = inputs.x.size(2)
    dt = functional.softplus(wide(inputs.dt) + parameters.dt_bias)
    log_a = -decay_rate(wide(inputs.decay), definition) * dt
    return Operands(
        _normed(inputs.queries, parameters.query_norm),
        _normed(inputs.keys, parameters.key_norm),
        log_a.transpose(1, 2).contiguous(),
        dt.transpose(1, 2).contiguous(),
        inputs.trap.transpose(1, 2).contiguous(),
        wide(inputs.angles).unsqueeze(2).expand(-1, -1, heads, -1).contiguous(),
    )


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    """`[b, l, R, g, n]` from `[b, l, g, R, n]`."""
    found = functional.rms_norm(x, x.shape[-1:], weight.to(x.dtype), EPSILON)
    return found.transpose(2, 3).contiguous()


def differentiable(inputs: Inputs, parameters: Parameters, definition: Definition) -> Operands:
    """The operands with gradients; only what they are computed from is saved for the backward."""
    found: tuple[Tensor, ...] = _Computed.apply(  # type: ignore[no-untyped-call]
        inputs.x.detach(), definition, *sources(inputs, parameters)
    )
    return Operands(*found)


class _Computed(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, definition: Definition, *read: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *read)
        ctx.definition = definition
        return tuple(compute(*_from_sources(x, *read), definition))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        found = gradients(*_from_sources(*ctx.saved_tensors), ctx.definition, Operands(*upstream))
        return None, None, *found


def sources(inputs: Inputs, parameters: Parameters) -> tuple[Tensor, ...]:
    """The tensors from which the operands are computed, in the order of `Gradients`."""
    return *inputs[2:], parameters.dt_bias, parameters.key_norm, parameters.query_norm


def _from_sources(x: Tensor, *read: Tensor) -> tuple[Inputs, Parameters]:
    """The inverse of `sources`; other fields are placeholders, and of x only the shape counts."""
    keys, queries, dt, decay, trap, angles, dt_bias, key_norm, query_norm = read
    inputs = Inputs(x, x, keys, queries, dt, decay, trap, angles)
    return inputs, Parameters(dt_bias, dt_bias, dt_bias, dt_bias, key_norm, query_norm)


def _by_kernels(inputs: Inputs) -> bool:
    return inputs.x.device.type != "cpu" or interpreted()


def compute(
    inputs: Inputs, parameters: Parameters, definition: Definition, spread: bool = True
) -> Operands:
    """The operands, without an autograd graph.

    Args:
        inputs: bf16, fp16 or fp32; on a CPU, any floating type.
        parameters: on the same device.
        definition: of A.
        spread: repeat the angles for every head, in fp32, as mamba-ssm's kernels take them;
            otherwise return those of the inputs, and the columns of SISO's keys and queries as
            `naive.halved` orders them, as `scan` takes them.
    """
    if not _by_kernels(inputs):
        found = plain(inputs, parameters, definition)
        return found if spread else _of_scan(found, inputs.angles)
    b, length, heads = inputs.dt.shape
    groups, rank, n = inputs.keys.shape[2:]
    like = inputs.x
    keys, queries = (like.new_empty(b, length, rank, groups, n) for _ in range(2))
    kernels.states(
        (dense(inputs.keys, 3), dense(inputs.queries, 3)),
        (parameters.key_norm, parameters.query_norm),
        (keys, queries),
        halve=rank == 1 and not spread,
    )
    log_a, dt = (
        torch.empty(b, heads, length, dtype=torch.float32, device=like.device) for _ in range(2)
    )
    trap = like.new_empty(b, heads, length)
    angles = inputs.angles
    if spread:
        shape = (b, length, heads, angles.size(-1))
        angles = torch.empty(shape, dtype=torch.float32, device=like.device)
    kernels.heads(
        (dense(inputs.dt, 1), dense(inputs.decay, 1), dense(inputs.trap, 1)),
        parameters.dt_bias,
        dense(inputs.angles, 1),
        (log_a, dt, trap, angles),
        definition,
        spread,
    )
    return Operands(queries, keys, log_a, dt, trap, angles)


def gradients(
    inputs: Inputs, parameters: Parameters, definition: Definition, upstream: Operands
) -> Gradients:
    """The gradients of what `compute` reads, each in the type of its tensor.

    Args:
        inputs: those of `compute`.
        parameters: those of `compute`.
        definition: of A.
        upstream: the gradients of the operands, of any floating type. That of the angles may be per
            head, `[b, l, h, k]`, or `[b, l, k]`; the latter is passed through.
    """
    if not _by_kernels(inputs):
        return _plain_gradients(inputs, parameters, definition, upstream)
    shape = inputs.keys.shape
    keys, queries = inputs.x.new_empty(shape), inputs.x.new_empty(shape)
    spread = upstream.angles.dim() == 4
    key_norm, query_norm = kernels.states_backward(
        (dense(inputs.keys, 3), dense(inputs.queries, 3)),
        (parameters.key_norm, parameters.query_norm),
        (upstream.keys.contiguous(), upstream.queries.contiguous()),
        (keys, queries),
        halve=shape[3] == 1 and not spread,
    )
    dt, decay, trap = (inputs.x.new_empty(inputs.dt.shape) for _ in range(3))
    angles = inputs.x.new_empty(inputs.angles.shape) if spread else upstream.angles.to(dt.dtype)
    dt_bias = kernels.heads_backward(
        (dense(inputs.dt, 1), dense(inputs.decay, 1)),
        parameters.dt_bias,
        tuple(each.contiguous() for each in upstream[2:]),
        (dt, decay, trap, angles),
        definition,
        spread,
    )
    return Gradients(
        *(keys, queries, dt, decay, trap, angles),
        dt_bias.to(parameters.dt_bias.dtype),
        key_norm.to(parameters.key_norm.dtype),
        query_norm.to(parameters.query_norm.dtype),
    )


def _plain_gradients(
    inputs: Inputs, parameters: Parameters, definition: Definition, upstream: Operands
) -> Gradients:
    read = [each.detach().requires_grad_() for each in sources(inputs, parameters)]
    with torch.enable_grad():
        found = plain(*_from_sources(inputs.x, *read), definition)
    if upstream.angles.dim() == 3:
        found = _of_scan(found, read[Gradients._fields.index("angles")])
    outer = [g.to(each.dtype) for g, each in zip(upstream, found, strict=True)]
    return Gradients(*torch.autograd.grad(found, read, outer))


def _of_scan(made: Operands, angles: Tensor) -> Operands:
    """What `scan` takes, from what mamba-ssm's kernels take."""
    if made.keys.size(2) == 1:
        made = made._replace(keys=halved(made.keys), queries=halved(made.queries))
    return made._replace(angles=angles)


def dense(x: Tensor, axes: int) -> Tensor:
    """x if its last axes are contiguous, as in a slice of the projection; otherwise a copy."""
    strides = torch.empty(x.shape[-axes:], device="meta").stride()
    return x if x.stride()[-axes:] == strides else x.contiguous()
