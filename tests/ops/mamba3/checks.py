"""Inputs of Mamba-3, and its definition as a loop over tokens."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from cppmega.ops.mamba3.naive import Inputs, Parameters, decay_rate


class Shape(NamedTuple):
    batch: int = 2
    length: int = 13
    heads: int = 4
    groups: int = 2
    rank: int = 3
    state: int = 8
    width: int = 5
    out_norm: bool = False

    @property
    def angles(self) -> int:
        return self.state // 4


def drawn(
    shape: Shape, dtype: torch.dtype = torch.float64, device: str = "cpu", dt: float = 0.0
) -> tuple[Inputs, Parameters]:
    """Inputs and parameters that require gradients.

    Args:
        shape: of the inputs.
        dtype: of inputs and norms; the other parameters are fp32, or fp64 where it is.
        device: of all tensors.
        dt: mean of dt before its softplus.
    """
    batch, length, heads, groups, rank, state, width, out_norm = shape
    generator = torch.Generator(device).manual_seed(3)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def draw(*size: int, of: torch.dtype = dtype) -> Tensor:
        made = torch.randn(size, generator=generator, dtype=torch.float64, device=device)
        return made.to(of).requires_grad_()

    tokens = (batch, length)
    inputs = Inputs(
        draw(*tokens, heads, width),
        draw(*tokens, heads, width),
        draw(*tokens, groups, rank, state),
        draw(*tokens, groups, rank, state),
        *(draw(*tokens, heads) for _ in range(3)),
        draw(*tokens, shape.angles),
    )
    ranks = [draw(heads, rank, width, of=wide) for _ in range(3)] if rank > 1 else [None] * 3
    parameters = Parameters(
        (draw(heads, of=wide) + dt).detach().requires_grad_(),
        draw(heads, of=wide),
        draw(heads, rank, state, of=wide),
        draw(heads, rank, state, of=wide),
        draw(state),
        draw(state),
        *ranks,
        draw(heads * width) if out_norm else None,
    )
    return inputs, parameters


def leaves(inputs: Inputs, parameters: Parameters) -> dict[str, Tensor]:
    """Everything that has a gradient, by name."""
    every = {**inputs._asdict(), **parameters._asdict()}
    return {name: each for name, each in every.items() if each is not None}


def token_by_token(inputs: Inputs, parameters: Parameters) -> Tensor:
    """The recurrence of the paper, `[b, l, h, p]`, one token, head and rank after the other."""
    out = torch.zeros_like(inputs.x)
    for b, h in torch.cartesian_prod(*map(torch.arange, (len(out), out.size(2)))).tolist():
        out[b, :, h] = _head(inputs, parameters, b, h)
    return out


def _head(inputs: Inputs, parameters: Parameters, b: int, h: int) -> Tensor:
    length, heads, width = inputs.x.shape[1:]
    groups, rank, state = inputs.keys.shape[2:]
    group = h // (heads // groups)
    pairs, angles = state // 2, inputs.angles.size(-1)
    theta = torch.zeros(angles, dtype=inputs.x.dtype)
    memory = inputs.x.new_zeros(state, width)
    before = inputs.x.new_zeros(state, width)
    rows = []
    for t in range(length):
        dt = torch.log1p(torch.exp(inputs.dt[b, t, h] + parameters.dt_bias[h]))
        decay = torch.exp(-decay_rate(inputs.decay[b, t, h], "softplus") * dt)
        theta = theta + math.pi * torch.tanh(inputs.angles[b, t]) * dt
        trap = torch.sigmoid(inputs.trap[b, t, h])
        now = inputs.x.new_zeros(state, width)
        queries, values = [], []
        for r in range(rank):
            made = []
            for x, norm, bias in (
                (inputs.keys, parameters.key_norm, parameters.key_bias),
                (inputs.queries, parameters.query_norm, parameters.query_bias),
            ):
                own = x[b, t, group, r]
                own = own / torch.sqrt(own.square().mean() + 1e-5) * norm + bias[h, r]
                turned = own.clone()
                for i in range(angles):
                    first, second = (2 * i, 2 * i + 1) if rank == 1 else (i, i + pairs)
                    z = torch.complex(own[first], own[second]) * torch.polar(
                        torch.ones_like(theta[i]), theta[i]
                    )
                    turned[first], turned[second] = z.real, z.imag
                made.append(turned)
            scale = parameters.rank_x[h, r] if parameters.rank_x is not None else 1
            values.append(inputs.x[b, t, h] * scale)
            now = now + torch.outer(made[0], values[-1])
            queries.append(made[1])
        memory = decay * memory + (1 - trap) * dt * decay * before + trap * dt * now
        before = now
        total = torch.zeros_like(inputs.x[b, t, h])
        for r in range(rank):
            own = queries[r] @ memory + parameters.d[h] * values[r]
            if parameters.out_norm is not None:
                weight = parameters.out_norm.view(heads, width)[h]
                own = own / torch.sqrt(own.square().mean() + 1e-5) * weight
            gate = inputs.z[b, t, h]
            gate = gate * parameters.rank_z[h, r] if parameters.rank_z is not None else gate
            own = own * gate * torch.sigmoid(gate)
            total = total + (
                own * parameters.rank_out[h, r] if parameters.rank_out is not None else own
            )
        rows.append(total)
    return torch.stack(rows)
