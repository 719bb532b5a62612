"""The launches of Mamba-3's kernels for Hopper, in Gluon, that take the places of `scan`'s."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from cppmega.ops.mamba3.forward_gluon import forward_sm90_kernel
from cppmega.ops.mamba3.rows_gluon import rows_sm90_kernel
from cppmega.ops.mamba3.tiles_gluon import descriptor
from cppmega.ops.mamba3.values_gluon import values_sm90_kernel
from cppmega.ops.mamba3.vectors_triton import vectors_kernel

SHARED = ("queries", "keys", "theta", "starts", "PACKED")
"""Arguments of the other kernels that these have too."""


def forward(problem: Any, named: dict[str, Any], out: Tensor) -> None:
    """Launch what writes the output.

    Args:
        problem: `scan._Problem`.
        named: the arguments of `forward_triton`.
        out: to be written.
    """
    b, _, heads, _ = out.shape
    skip = problem.parameters.d.contiguous()
    forward_sm90_kernel[(heads, b)](**_given(problem, named), skip=skip, out=out)


def parts(
    problem: Any,
    named: dict[str, Any],
    states: Tensor,
    gradients: Tensor,
    grads: Any,
    angle_grads: list[Any],
    sums: Tensor,
) -> list[Tensor]:
    """Launch what follows the states in `scan._parts`; returns the same."""
    b, _, heads, _ = problem.inputs.x.shape
    groups, rank, state = problem.inputs.keys.shape[2:]
    chunks = problem.chunks
    tiles = [descriptor(each.view(-1, 64)) for each in (states, gradients)]
    given = {**_given(problem, named), "do": named["do"]}
    values_sm90_kernel[(heads, chunks, b)](
        **given, states=tiles[0], gradients=tiles[1], skip=problem.parameters.d.contiguous(),
        d_x=grads.d_x, d_z=grads.d_z, d_log_a=grads.d_log_a, d_at_once=grads.d_at_once,
        d_next=grads.d_next, d_skip=grads.d_skip, sums=sums,
    )  # fmt: skip
    # The weights of SISO are no parameters, and their gradients are not computed.
    learned = [sums.sum((0, 1)) if rank > 1 else sums.new_zeros(heads, sums.size(-1))]
    sums = sums.new_empty(b, chunks, heads, rank * state)
    for keys, d_rows in enumerate((grads.d_queries, grads.d_keys)):
        rows_sm90_kernel[(chunks, groups, b)](
            **given, **angle_grads[keys]._asdict(), states=tiles[keys], d_rows=d_rows, sums=sums,
            KEYS=bool(keys),
        )  # fmt: skip
        learned.append(sums.sum((0, 1)))
    return learned


def _given(problem: Any, named: dict[str, Any]) -> dict[str, Any]:
    """Arguments that the kernels share, from those of the others."""
    b, length, heads, _ = problem.inputs.x.shape
    groups, rank = problem.inputs.keys.shape[2:4]
    chunks, tokens = problem.chunks, problem.tokens
    vectors = problem.operands.dt.new_empty(b, chunks, heads, 8, tokens)
    vectors_kernel[(-(-chunks // 8), heads, b)](
        **{name: named[name] for name in ("log_a", "dt", "trap", "starts", "PACKED")},
        vectors=vectors, length=length, chunks=chunks, H=heads, T=tokens, CHUNKS=8, num_warps=1,
    )  # fmt: skip
    # All parameters of a head one after the other: biases, and the ranks' weights, transposed.
    weights = [named[name].transpose(1, 2) for name in ("rank_x", "rank_z", "rank_out")]
    learned = [each.flatten(1) for each in (named["query_bias"], named["key_bias"], *weights)]
    return {
        **{name: named[name] for name in SHARED},
        **values_of(named),
        "vectors": vectors,
        "rate": torch.tanh(problem.inputs.angles.float()).contiguous(),
        "by_head": functional.pad(torch.cat(learned, 1), (0, 64 * rank)),
        **{"length": length, "chunks": chunks, "H": heads, "G": groups, "R": rank},
        **{"num_warps": 8, "maxnreg": 128},
    }


def values_of(named: dict[str, Any]) -> dict[str, Any]:
    """x and z with their strides, copied where rows do not begin at multiples of 16 elements.

    Triton knows of strides and addresses only whether 16 divides them, and an asynchronous copy of
    less than 4 bytes that are known to be next to each other does not compile.
    """
    given: dict[str, Any] = {}
    for name in ("x", "z"):
        values: Tensor = named[name]
        if any(at % 16 for at in (values.data_ptr(), *values.stride()[:2])):
            values = values.contiguous()
        given |= {name: values, f"{name}_b": values.stride(0), f"{name}_l": values.stride(1)}
    return given
