"""Mamba-3 by the kernels of mamba-ssm 2.3.2.post1, with the fixes of cppmega's pages for NAM56R.

The scan of rank R (MIMO) is a TileLang kernel, that of rank 1 (SISO) a Triton kernel. Their inputs
are computed by `mamba3.operands`. MIMO without an output norm saves none of them: the backward
recomputes them, without any matrix product, from the projection, which is saved in any case.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from cppmega.ops.common.launch import on_device_of
from cppmega.ops.common.numerics import wide
from cppmega.ops.common.once_differentiable import once_differentiable
from cppmega.ops.mamba3 import operands
from cppmega.ops.mamba3.naive import Definition, Inputs, Parameters, normed, without_tokens
from cppmega.ops.mamba3.operands import Operands

VERSION = "2.3.2.post1"
"""Of mamba-ssm: the one release that has Mamba-3."""

SCAN = "selective_scan_cuda"
"""The compiled scan of Mamba-1, without which mamba-ssm's package refuses to be imported."""

MIMO = "mamba_ssm.ops.tilelang.mamba3.mamba3_mimo"
SISO = "mamba_ssm.ops.triton.mamba3.mamba3_siso_combined"
ANGLES = "mamba_ssm.ops.triton.mamba3.angle_dt"

ROWS = 64
"""Rank times chunk beyond which MIMO's kernels need more shared memory than an H200 has."""


def obstacle(device: torch.device, inputs: Inputs, parameters: Parameters, chunk: int) -> str:
    """Why the kernels cannot do this, as half a sentence; empty where they can."""
    if device.type != "cuda":
        return f"the tensors are on {device.type}"
    try:
        found = importlib.metadata.version("mamba-ssm")
    except importlib.metadata.PackageNotFoundError:
        return "mamba-ssm is not installed"
    if found != VERSION:
        return f"mamba-ssm {found} is installed, not {VERSION}"
    if inputs.x.dtype != torch.bfloat16:
        return f"the tensors are {inputs.x.dtype}, not bfloat16"
    rank, state = inputs.keys.shape[-2:]
    width = inputs.x.size(-1)
    if state & state - 1 or width & width - 1:
        return f"states of {state} x {width} are not powers of two"
    if rank == 1 and inputs.x.size(2) % 4:
        # https://github.com/state-spaces/mamba/issues/886: a misaligned address in the backward.
        return f"{inputs.x.size(2)} heads of rank 1 are no multiple of 4"
    if rank > 1 and importlib.util.find_spec("tilelang") is None:
        return "tilelang is not installed"
    if rank > 1 and (rank * chunk > ROWS or chunk < 8):
        return f"chunks of {chunk} tokens at rank {rank} (8 tokens at least, {ROWS} rows at most)"
    return ""


class _NotCompiled(ModuleType):
    """A placeholder for the compiled scan, which fails only when one of its attributes is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(f"{SCAN}.{name}: mamba-ssm was installed without Mamba-1's compiled scan")


def of_mamba_ssm(name: str) -> Any:
    """Import a module of mamba-ssm, built with its compiled scan or without.

    Mamba-3 never calls that scan, and its wheel builds without a compiler otherwise; main made the
    import optional in https://github.com/state-spaces/mamba/pull/977.
    """
    if SCAN not in sys.modules and importlib.util.find_spec(SCAN) is None:
        absent = _NotCompiled(SCAN)
        absent.__spec__ = ModuleSpec(SCAN, None)
        sys.modules[SCAN] = absent
    return importlib.import_module(name)


def mixed(
    inputs: Inputs,
    parameters: Parameters,
    definition: Definition,
    boundaries: Tensor | None,
    chunk: int,
) -> Tensor:
    """Compute `naive.mixed` of `[b, l, h, p]`; see there and `ops.mamba3.mixed`.

    A sequence is padded to complete chunks: the kernels have no special case for a partial one, and
    fewer lengths mean fewer kernels to compile. No token sees the padding after it.
    """
    if not inputs.x.numel():
        return without_tokens(inputs, parameters)
    length = inputs.x.size(1)
    if boundaries is None and length % chunk:
        more = chunk - length % chunk
        inputs = Inputs(*(_lengthened(each, more) for each in inputs))
    with on_device_of(inputs.x):  # mamba-ssm launches on the current device
        return _mixed(inputs, parameters, definition, boundaries, chunk)[:, :length]


def _lengthened(x: Tensor, more: int) -> Tensor:
    """`[b, l + more, ...]`, with zeros at the end."""
    return torch.cat((x, x.new_zeros(x.size(0), more, *x.shape[2:])), 1)


def _mixed(
    inputs: Inputs,
    parameters: Parameters,
    definition: Definition,
    boundaries: Tensor | None,
    chunk: int,
) -> Tensor:
    if parameters.rank_x is None:
        made = operands.differentiable(inputs, parameters, definition)
        return _siso(made, inputs, parameters, boundaries, chunk)
    if parameters.out_norm is None:
        lean: Tensor = _Mimo.apply(  # type: ignore[no-untyped-call]
            definition, boundaries, chunk, *inputs, *parameters[:-1]
        )
        return lean
    made = operands.differentiable(inputs, parameters, definition)
    out = _mimo(made, inputs, parameters, boundaries, chunk).transpose(2, 3)  # [b, l, h, R, p]
    assert parameters.rank_z is not None and parameters.rank_out is not None
    gate = functional.silu(wide(inputs.z).unsqueeze(3) * parameters.rank_z)
    out = normed(wide(out), _per_head(parameters.out_norm, inputs)) * gate
    return (out * parameters.rank_out).sum(3).to(inputs.x.dtype)


def _per_head(weight: Tensor, inputs: Inputs) -> Tensor:
    """`[h, 1, p]` from `[h * p]`."""
    return weight.view(inputs.x.size(2), 1, inputs.x.size(3))


def _mimo(
    made: Operands,
    inputs: Inputs,
    parameters: Parameters,
    boundaries: Tensor | None,
    chunk: int,
) -> Tensor:
    """`[b, l, h, p]`; with a norm of the output `[b, l, R, h, p]`, before gate and sum."""
    apart = parameters.out_norm is not None
    found: Tensor = of_mamba_ssm(MIMO).mamba3_mimo(
        Q=made.queries,
        K=made.keys,
        V=inputs.x,
        ADT=made.log_a,
        DT=made.dt,
        Trap=made.trap,
        Q_bias=parameters.query_bias,
        K_bias=parameters.key_bias,
        MIMO_V=parameters.rank_x,
        MIMO_Z=parameters.rank_z,
        MIMO_Out=None if apart else parameters.rank_out,
        Angles=made.angles,
        D=parameters.d,
        Z=None if apart else inputs.z,
        chunk_size=chunk,
        rotary_dim_divisor=_divisor(inputs),
        dtype=inputs.x.dtype,
        cu_seqlens=boundaries,
    )
    return found


def _divisor(inputs: Inputs) -> int:
    """The width of a state over the number of its angles."""
    return inputs.keys.size(-1) // inputs.angles.size(-1)


class _Mimo(torch.autograd.Function):
    """MIMO without an output norm; saves only the projection for its backward."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        definition: Definition,
        boundaries: Tensor | None,
        chunk: int,
        *tensors: Tensor,
    ) -> Tensor:
        inputs, parameters = Inputs(*tensors[:8]), Parameters(*tensors[8:])
        ctx.definition, ctx.chunk, ctx.boundaries = definition, chunk, boundaries
        ctx.save_for_backward(*tensors)
        made = operands.compute(inputs, parameters, definition)
        return _mimo(made, inputs, parameters, boundaries, chunk)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        tensors = [each.detach() for each in ctx.saved_tensors]
        inputs, parameters = Inputs(*tensors[:8]), Parameters(*tensors[8:])
        made = operands.compute(inputs, parameters, ctx.definition)
        turned = of_mamba_ssm(ANGLES).angle_dt_fwd(
            made.angles, made.dt, chunk_size=ctx.chunk, cu_seqlens=ctx.boundaries
        )
        given = Parameters(*(each.contiguous() for each in tensors[8:]))
        # mamba-ssm's own backward, with what its forward would have kept.
        of_kernels = SimpleNamespace(
            saved_tensors=(
                *(made.queries, made.keys, inputs.x.contiguous(), made.log_a, made.dt, made.trap),
                *(given.query_bias, given.key_bias, made.angles, turned, given.d),
                inputs.z.contiguous(),
                *(given.rank_x, given.rank_out, given.rank_z, ctx.boundaries),
            ),
            chunk_size=ctx.chunk,
            rotary_dim_divisor=_divisor(inputs),
            dtype=inputs.x.dtype,
        )
        function = of_mamba_ssm(MIMO)._Mamba3Function
        (q, k, x, log_a, dt, trap, q_bias, k_bias, rank_x, rank_z, rank_out, angles, d, z) = (
            function.backward(of_kernels, gradients[0])[:14]
        )
        found = operands.gradients(
            inputs, parameters, ctx.definition, Operands(q, k, log_a, dt, trap, angles)
        )
        return (
            *(None, None, None),
            *(z, x, *found[:6], found.dt_bias, d, k_bias, q_bias),
            *(found.key_norm, found.query_norm, rank_x, rank_z, rank_out),
        )


def _siso(
    made: Operands,
    inputs: Inputs,
    parameters: Parameters,
    boundaries: Tensor | None,
    chunk: int,
) -> Tensor:
    apart = parameters.out_norm is not None
    out: Tensor = of_mamba_ssm(SISO).mamba3_siso_combined(
        Q=made.queries.squeeze(2),
        K=made.keys.squeeze(2),
        V=inputs.x,
        ADT=made.log_a,
        DT=made.dt,
        Trap=made.trap,
        Q_bias=parameters.query_bias.squeeze(1),
        K_bias=parameters.key_bias.squeeze(1),
        Angles=made.angles,
        D=parameters.d,
        Z=None if apart else inputs.z,
        chunk_size=chunk,
        cu_seqlens=boundaries,
    )
    if parameters.out_norm is None:
        return out
    out = normed(wide(out), _per_head(parameters.out_norm, inputs).squeeze(1))
    return (out * functional.silu(wide(inputs.z))).to(inputs.x.dtype)
