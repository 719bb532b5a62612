"""What Mamba-3's scan reads besides values and gates, made from a projection.

`plain` is the definition, for any device and for autograd. On a GPU `made` and `gradients` are the
same by two launches each way (`mamba3_operands_triton`), which read the projection where it lies;
plain torch needs a dozen, with a copy for every layout that the scan asks for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import functional

from cppmega.ops import mamba3_operands_triton as kernels
from cppmega.ops.dsa_indexer_reference import wide
from cppmega.ops.mamba3_reference import EPSILON, Definition, Inputs, Parameters, decay_rate


class Operands(NamedTuple):
    """What the kernels of the scan read besides parameters, x and z.

    Attributes:
        queries: `[b, l, R, g, n]`.
        keys: `[b, l, R, g, n]`.
        log_a: `[b, h, l]`, fp32.
        dt: `[b, h, l]`, fp32.
        trap: `[b, h, l]`.
        angles: `[b, l, h, k]`, fp32; or `[b, l, k]` as they were given, for `mamba3_scan`.
    """

    queries: Tensor
    keys: Tensor
    log_a: Tensor
    dt: Tensor
    trap: Tensor
    angles: Tensor


class Gradients(NamedTuple):
    """Of the part of a projection, and of the parameters, that `Operands` are made from.

    Attributes are named and shaped as in `Inputs` and `Parameters`.
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


def in_autograd(inputs: Inputs, parameters: Parameters, definition: Definition) -> Operands:
    """The operands, for which autograd keeps nothing but what they are made from."""
    found: tuple[Tensor, ...] = _Made.apply(  # type: ignore[no-untyped-call]
        inputs.x.detach(), definition, *read_of(inputs, parameters)
    )
    return Operands(*found)


class _Made(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, definition: Definition, *read: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *read)
        ctx.definition = definition
        return tuple(made(*_read(x, *read), definition))

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        found = gradients(*_read(*ctx.saved_tensors), ctx.definition, Operands(*given))
        return None, None, *found


def read_of(inputs: Inputs, parameters: Parameters) -> tuple[Tensor, ...]:
    """What the operands are made from, in the order of `Gradients`."""
    return *inputs[2:], parameters.dt_bias, parameters.key_norm, parameters.query_norm


def _read(x: Tensor, *read: Tensor) -> tuple[Inputs, Parameters]:
    """Inputs and parameters, of which only what `read_of` returns is meant, and the shape of x."""
    keys, queries, dt, decay, trap, angles, dt_bias, key_norm, query_norm = read
    inputs = Inputs(x, x, keys, queries, dt, decay, trap, angles)
    return inputs, Parameters(dt_bias, dt_bias, dt_bias, dt_bias, key_norm, query_norm)


def _by_kernels(inputs: Inputs) -> bool:
    return inputs.x.device.type != "cpu" or bool(triton.knobs.runtime.interpret)


def made(
    inputs: Inputs, parameters: Parameters, definition: Definition, spread: bool = True
) -> Operands:
    """The operands, without a graph for autograd.

    Args:
        inputs: bf16, fp16 or fp32, whose last axis is contiguous; on a CPU of any type.
        parameters: of the same device.
        definition: of A.
        spread: return the angles of every head; else they are those of the inputs.
    """
    if not _by_kernels(inputs):
        found = plain(inputs, parameters, definition)
        return found if spread else found._replace(angles=inputs.angles)
    b, length, heads = inputs.dt.shape
    groups, rank, n = inputs.keys.shape[2:]
    like = inputs.x
    keys, queries = (like.new_empty(b, length, rank, groups, n) for _ in range(2))
    kernels.states(
        (_rows(inputs.keys), _rows(inputs.queries)),
        (parameters.key_norm, parameters.query_norm),
        (keys, queries),
    )
    log_a, dt = (
        torch.empty(b, heads, length, dtype=torch.float32, device=like.device) for _ in range(2)
    )
    trap = like.new_empty(b, heads, length)
    angles = inputs.angles
    if spread:
        shape = (b, length, heads, angles.size(-1))
        angles = torch.empty(shape, dtype=torch.float32, device=like.device)
    of_heads = inputs.dt, inputs.decay, inputs.trap
    kernels.heads(
        of_heads, parameters.dt_bias, inputs.angles, (log_a, dt, trap, angles), definition, spread
    )
    return Operands(queries, keys, log_a, dt, trap, angles)


def gradients(
    inputs: Inputs, parameters: Parameters, definition: Definition, given: Operands
) -> Gradients:
    """The gradients of what `made` reads, each in the type of what it belongs to.

    Args:
        inputs: those of `made`.
        parameters: those of `made`.
        definition: of A.
        given: the gradients of its results, of any floating type; that of the angles as they are,
            which is returned, or of every head's.
    """
    if not _by_kernels(inputs):
        return _plain_gradients(inputs, parameters, definition, given)
    shape = inputs.keys.shape
    keys, queries = inputs.x.new_empty(shape), inputs.x.new_empty(shape)
    key_norm, query_norm = kernels.states_backward(
        (_rows(inputs.keys), _rows(inputs.queries)),
        (parameters.key_norm, parameters.query_norm),
        (given.keys.contiguous(), given.queries.contiguous()),
        (keys, queries),
    )
    dt, decay, trap = (inputs.x.new_empty(inputs.dt.shape) for _ in range(3))
    spread = given.angles.dim() == 4
    angles = inputs.x.new_empty(inputs.angles.shape) if spread else given.angles.to(dt.dtype)
    dt_bias = kernels.heads_backward(
        (inputs.dt, inputs.decay),
        parameters.dt_bias,
        tuple(each.contiguous() for each in given[2:]),
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
    inputs: Inputs, parameters: Parameters, definition: Definition, given: Operands
) -> Gradients:
    read = [each.detach().requires_grad_() for each in read_of(inputs, parameters)]
    with torch.enable_grad():
        found = plain(*_read(inputs.x, *read), definition)
    if given.angles.dim() == 3:
        found = found._replace(angles=read[Gradients._fields.index("angles")])
    outer = [g.to(each.dtype) for g, each in zip(given, found, strict=True)]
    return Gradients(*torch.autograd.grad(found, read, outer))


def _rows(x: Tensor) -> Tensor:
    """`[b, l, g, R, n]` whose last three axes lie together."""
    rank, n = x.shape[3:]
    return x if x.stride()[2:] == (rank * n, n, 1) else x.contiguous()
