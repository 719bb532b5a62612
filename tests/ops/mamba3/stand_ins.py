"""What mamba-ssm's Mamba-3 functions compute, in plain torch, under their names and layouts."""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from cppmega.ops.mamba3 import external as kernels
from cppmega.ops.mamba3 import naive as reference


def turned(Angles: Tensor, DT: Tensor, cu_seqlens: Tensor | None = None, **_: Any) -> Tensor:
    """Accumulated angles `[b, l, h, k]`, which begin anew with every document."""
    steps = math.pi * torch.tanh(Angles) * DT.transpose(1, 2).unsqueeze(-1)
    return torch.cat([part.cumsum(1) for part in _documents(steps, cu_seqlens)], 1)


def _documents(x: Tensor, cu_seqlens: Tensor | None) -> list[Tensor]:
    if cu_seqlens is None:
        return [x]
    return list(x.split(cu_seqlens.diff().tolist(), 1))


def mimo(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    ADT: Tensor,
    DT: Tensor,
    Trap: Tensor,
    Q_bias: Tensor,
    K_bias: Tensor,
    MIMO_V: Tensor | None,
    MIMO_Z: Tensor | None,
    MIMO_Out: Tensor | None,
    Angles: Tensor,
    D: Tensor,
    Z: Tensor | None,
    chunk_size: int,
    rotary_dim_divisor: int,
    cu_seqlens: Tensor | None = None,
    pairwise: bool = False,
    **_: Any,
) -> Tensor:
    assert Angles.size(-1) * rotary_dim_divisor == Q.size(-1)
    heads = V.size(2)
    theta = turned(Angles, DT, cu_seqlens)

    def of_heads(x: Tensor, bias: Tensor) -> Tensor:
        x = x.repeat_interleave(heads // x.size(3), 3).transpose(2, 3)
        return reference.rotated(x + bias, theta, pairwise)

    values = V.unsqueeze(3) if MIMO_V is None else V.unsqueeze(3) * MIMO_V
    per_token = (
        *(of_heads(Q, Q_bias), of_heads(K, K_bias), values),
        *(each.transpose(1, 2) for each in (ADT, DT, torch.sigmoid(Trap))),
    )
    parts = zip(*(_documents(each, cu_seqlens) for each in per_token), strict=True)
    out = torch.cat([reference.scan(*part, chunk_size) for part in parts], 1)
    out = out + D[:, None, None] * values
    if Z is not None:
        gate = Z.unsqueeze(3) if MIMO_Z is None else Z.unsqueeze(3) * MIMO_Z
        out = out * torch.nn.functional.silu(gate)
    return out.transpose(2, 3) if MIMO_Out is None else (out * MIMO_Out).sum(3)


def siso(Q: Tensor, K: Tensor, Q_bias: Tensor, K_bias: Tensor, **given: Any) -> Tensor:
    """The same of rank 1, whose pairs are neighbours."""
    divisor = Q.size(-1) // given["Angles"].size(-1)
    ranked = (Q.unsqueeze(2), K.unsqueeze(2))
    biases = {"Q_bias": Q_bias.unsqueeze(1), "K_bias": K_bias.unsqueeze(1)}
    no = dict.fromkeys(("MIMO_V", "MIMO_Z", "MIMO_Out"))
    out = mimo(*ranked, **biases, **no, **given, rotary_dim_divisor=divisor, pairwise=True)
    return out.squeeze(2)


class Function:
    """The autograd function of MIMO, of which the backward is called by itself."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *given, turned_before, d, z, rank_x, rank_out, rank_z, bounds = (
            each if each is None else each.detach() for each in ctx.saved_tensors
        )
        torch.testing.assert_close(turned_before, turned(given[8], given[4], bounds))
        tensors = [*given[:8], rank_x, rank_z, rank_out, given[8], d, z]
        leaves = [each.requires_grad_() for each in tensors]
        with torch.enable_grad():
            out = mimo(*leaves, ctx.chunk_size, ctx.rotary_dim_divisor, cu_seqlens=bounds)
        return (*torch.autograd.grad(out, leaves, gradient), *[None] * 5)


def installed() -> Any:
    """A context in which mamba-ssm's modules are these."""

    def module(name: str, **members: Any) -> ModuleType:
        made = ModuleType(name)
        vars(made).update(members)
        return made

    def with_state(angle: Tensor, dt: Tensor, **given: Any) -> Tensor:
        return turned(angle, dt, given.get("cu_seqlens"))

    return mock.patch.dict(
        sys.modules,
        {
            kernels.MIMO: module(kernels.MIMO, mamba3_mimo=mimo, _Mamba3Function=Function),
            kernels.SISO: module(kernels.SISO, mamba3_siso_combined=siso),
            kernels.ANGLES: module(kernels.ANGLES, angle_dt_fwd=with_state),
        },
    )
