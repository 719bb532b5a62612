"""Mamba-3's scan of rank R, with the gate and the sum over ranks, in Triton.

In the forward, one program scans a head of a sequence from its first chunk to its last. In the
backward, one launch scans every head in both directions at once and stores the states at the chunk
boundaries and their gradients; from these, all chunks are computed in parallel, the gradients of
values, gates and decays by head, and those of keys and queries by the groups that share them
(`benchmarks/results/mamba3_scan_designs.md` has the designs that were tried). A Hopper GPU takes
kernels of its own for most of it (`scan_hopper`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from cppmega.ops.common import mamba3_scan_sizes
from cppmega.ops.common.device import LEAST_SHARED, Gpu, gpu_of
from cppmega.ops.common.dispatch import interpreted
from cppmega.ops.common.launch import only_compiled
from cppmega.ops.mamba3.angles_triton import (
    angles_backward_kernel,
    angles_kernel,
    later_kernel,
)
from cppmega.ops.mamba3.forward_triton import forward_kernel
from cppmega.ops.mamba3.naive import Inputs, Parameters
from cppmega.ops.mamba3.operands import Operands, dense
from cppmega.ops.mamba3.rows_triton import rows_kernel
from cppmega.ops.mamba3.states_triton import states_kernel
from cppmega.ops.mamba3.values_triton import values_kernel

_LOG = logging.getLogger(__name__)
_P = ParamSpec("_P")
_T = TypeVar("_T")

ROWS = 64
"""Rows of a chunk: its tokens times the rank."""

SCRATCH = 1 << 31
"""Bytes that the backward allocates at a time for states, their gradients and sums over chunks: it
takes as many sequences at once as fit, and at least one."""

LAUNCH = {"num_warps": 4, "num_stages": 2}
"""For the kernels that multiply matrices of 64 rows: one warp group on Hopper."""

ROOMY = 160 * 1024
"""Shared memory with which a kernel that walks along a sequence loads two chunks in advance."""


class Gradients(NamedTuple):
    """Gradients of everything that the scan reads, beginning with `Operands` in their order."""

    queries: Tensor
    keys: Tensor
    log_a: Tensor
    dt: Tensor
    trap: Tensor
    angles: Tensor
    x: Tensor
    z: Tensor
    query_bias: Tensor
    key_bias: Tensor
    d: Tensor
    rank_x: Tensor
    rank_z: Tensor
    rank_out: Tensor


def obstacle(inputs: Inputs, parameters: Parameters) -> str:
    """Why the kernels do not support this, as half a sentence; empty if they do."""
    heads, width = inputs.x.shape[2:]
    groups, rank, state = inputs.keys.shape[2:]
    device, kind = inputs.x.device, inputs.x.dtype
    if device.type == "cuda" and kind not in (torch.bfloat16, torch.float16):
        return f"the tensors are {kind}, not of 16 bits"
    gpu = gpu_of(device)
    if gpu.capability < (8, 0):
        return f"its products of 16 bits need sm_80, not sm_{gpu.capability[0]}{gpu.capability[1]}"
    if gpu.shared < LEAST_SHARED or (gpu.shared < ROOMY and state * width > 128 * 64):
        return f"states of {state} x {width} need more shared memory than {gpu.shared >> 10} KiB"
    return mamba3_scan_sizes.obstacle(
        heads_per_group=heads // groups,
        rank=rank,
        state=state,
        width=width,
        angles=inputs.angles.size(2),
        out_norm=parameters.out_norm is not None,
    )


class _Problem(NamedTuple):
    """The tensors of a slice of the batch, and the arguments that several kernels share."""

    operands: Operands
    inputs: Inputs
    parameters: Parameters
    starts: Tensor | None

    @property
    def chunks(self) -> int:
        return -(-self.inputs.x.size(1) // self.tokens)

    @property
    def tokens(self) -> int:
        """Tokens per chunk."""
        return ROWS // self.inputs.keys.size(3)

    def angled(self) -> dict[str, Any]:
        heads, groups = self.inputs.x.size(2), self.inputs.keys.size(2)
        angles = dense(self.inputs.angles, 1)
        return {
            "angles": angles,
            "dt": self.operands.dt,
            "length": angles.size(1),
            "chunks": self.chunks,
            "angles_b": angles.stride(0),
            "angles_l": angles.stride(1),
            "H": heads,
            "G": groups,
            "K": angles.size(2),
            "T": self.tokens,
        }

    def packed(self) -> dict[str, Any]:
        """The starts of documents; without a pack, a placeholder that is not read."""
        return {
            "starts": self.operands.dt if self.starts is None else self.starts,
            "PACKED": self.starts is not None,
        }

    def given(self) -> dict[str, Any]:
        operands, inputs, learned = self.operands, self.inputs, self.parameters
        x, z = dense(inputs.x, 2), dense(inputs.z, 2)
        ranks = ("rank_x", "rank_z", "rank_out")
        return {
            **self.angled(),
            **{name: getattr(operands, name) for name in ("queries", "keys", "log_a", "trap")},
            **self.packed(),
            **{"x": x, "x_b": x.stride(0), "x_l": x.stride(1)},
            **{"z": z, "z_b": z.stride(0), "z_l": z.stride(1)},
            "query_bias": learned.query_bias.contiguous(),
            "key_bias": learned.key_bias.contiguous(),
            **{name: getattr(learned, name).contiguous() for name in ranks},
            **{"R": inputs.keys.size(3), "P": x.size(3)},
        }

    def theta(self) -> Tensor:
        """Angles before each chunk, `[b, chunks, h, k]`, in turns between -1/2 and 1/2."""
        b, _, heads, _ = self.inputs.x.shape
        theta = self.operands.dt.new_empty(b, self.chunks, heads, self.inputs.angles.size(2))
        angles_kernel[(self.inputs.keys.size(2), b)](theta=theta, **self.angled(), num_warps=4)
        return theta


def starts_of(boundaries: Tensor | None, length: int) -> Tensor | None:
    """The first token of each token's document, int32 `[l]`."""
    if boundaries is None:
        return None
    token = torch.arange(length, device=boundaries.device, dtype=boundaries.dtype)
    document = torch.searchsorted(boundaries, token, right=True) - 1
    return boundaries[document].to(torch.int32)


def _walking(device: torch.device) -> dict[str, int]:
    """Launch options of the kernels that walk along a sequence."""
    return {**LAUNCH, "num_stages": 3 if gpu_of(device).shared >= ROOMY else 2}


def _compiled_first(
    launches: Callable[Concatenate[Operands, Inputs, Parameters, Tensor | None, _P], _T],
) -> Callable[Concatenate[Operands, Inputs, Parameters, Tensor | None, _P], _T]:
    """Compile the kernels of a first call side by side, which takes a third of the time."""
    known: set[Any] = set()

    @functools.wraps(launches)
    def call(
        operands: Operands,
        inputs: Inputs,
        parameters: Parameters,
        boundaries: Tensor | None,
        /,
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> _T:
        x, keys = inputs.x, inputs.keys
        kind = (x.device, x.dtype, x.shape[2:], keys.shape[2:], boundaries is None)
        if x.is_cuda and kind not in known and not torch.compiler.is_compiling():
            known.add(kind)
            with only_compiled():
                launches(operands, inputs, parameters, boundaries, *args, **kwargs)
        return launches(operands, inputs, parameters, boundaries, *args, **kwargs)

    return call


@_compiled_first
def forward(
    operands: Operands, inputs: Inputs, parameters: Parameters, boundaries: Tensor | None
) -> Tensor:
    """The gated output `[b, l, h, p]`, in the type of x.

    Args:
        operands: what `operands.compute` returns; its angles are not read.
        inputs: of which only x, z and the angles are read.
        parameters: those of MIMO without an output norm.
        boundaries: int32 `[documents + 1]`, cumulative lengths of a pack; None: no pack.
    """
    problem = _Problem(operands, inputs, parameters, starts_of(boundaries, inputs.x.size(1)))
    b, _, heads, _ = inputs.x.shape
    out = torch.empty(inputs.x.shape, dtype=inputs.x.dtype, device=inputs.x.device)
    if on_hopper(inputs):
        from cppmega.ops.mamba3 import scan_hopper

        scan_hopper.forward(problem, {**problem.given(), "theta": problem.theta()}, out)
        return out
    forward_kernel[(heads, b)](
        theta=problem.theta(), skip=parameters.d.contiguous(), out=out, **problem.given(),
        **_walking(inputs.x.device),
    )  # fmt: skip
    return out


def on_hopper(inputs: Inputs) -> bool:
    """Whether the kernels for sm_90 are taken, which know one size of heads and states."""
    if interpreted():
        return False
    return _hopper(gpu_of(inputs.x.device), inputs.keys.size(-1), inputs.x.size(-1))


@functools.cache
def _hopper(gpu: Gpu, state: int, width: int) -> bool:
    """The same for a GPU and sizes; logs which kernels are taken, and why."""
    import triton

    level, why = logging.INFO, ""
    if gpu.capability[0] != 9:
        why = f"the GPU is sm_{gpu.capability[0]}{gpu.capability[1]}"
    elif (state, width) != (128, 64):
        why = f"states are {state} x {width}, and those for Hopper know 128 x 64"
    elif not triton.__version__.startswith("3.6."):
        level, why = (
            logging.WARNING,
            f"Triton is {triton.__version__}, and those for Hopper need 3.6",
        )
    kernels = f"every GPU, since {why}" if why else "Hopper"
    _LOG.log(level, f"Mamba-3's scan takes its kernels for {kernels}.")
    return not why


class _BatchGradients(NamedTuple):
    """Gradients with a batch axis, named like the arguments of the backward kernels."""

    d_queries: Tensor
    d_keys: Tensor
    d_x: Tensor
    d_z: Tensor
    d_log_a: Tensor
    d_at_once: Tensor
    d_next: Tensor
    d_skip: Tensor


class _AngleGradients(NamedTuple):
    """Contributions to the gradients of angles and dt: of queries, then of keys, `[2, b, ...]`, or
    of one of the two, `[b, ...]`."""

    d_dt: Tensor
    d_angles: Tensor
    d_theta: Tensor


@_compiled_first
def backward(
    operands: Operands,
    inputs: Inputs,
    parameters: Parameters,
    boundaries: Tensor | None,
    do: Tensor,
) -> Gradients:
    """The gradients of everything that `forward` reads, from that of its result."""
    problem = _Problem(operands, inputs, parameters, starts_of(boundaries, inputs.x.size(1)))
    b, length, heads, width = inputs.x.shape
    groups, rank, state = inputs.keys.shape[2:]
    fp32, theta = operands.dt.new_empty, problem.theta()
    grads = _BatchGradients(
        torch.empty_like(operands.queries),
        torch.empty_like(operands.keys),
        *(do.new_empty(b, length, heads, width) for _ in range(2)),
        *(fp32(b, heads, length) for _ in range(4)),
    )
    angles_shape = (b, groups, length, inputs.angles.size(2))
    angle_grads = _AngleGradients(
        fp32(2, b, heads, length), fp32(2, *angles_shape), fp32(2, *theta.shape)
    )
    chunk_bytes = 2 * 2 * width * state + 4 * rank * (state + 3 * width)
    at_a_time = max(1, SCRATCH // (problem.chunks * heads * chunk_bytes))
    sums = []
    for first in range(0, b, at_a_time):
        own = slice(first, first + at_a_time)
        part = problem._replace(
            operands=Operands(*(each[own] for each in operands)),
            inputs=Inputs(*(each[own] for each in inputs)),
        )
        into = _BatchGradients(*(each[own] for each in grads))
        sides = [_AngleGradients(*(each[side, own] for each in angle_grads)) for side in range(2)]
        sums.append(torch.cat(_parts(part, theta[own], do[own].contiguous(), into, sides), 1))
    d_angles, d_dt = _sum_angle_gradients(problem, angle_grads)
    learned = torch.stack(sums).sum(0)
    widths = [rank * width] * 3 + [rank * state] * 2
    rank_out, rank_z, rank_x, query_bias, key_bias = (
        each.reshape(heads, -1, rank).transpose(1, 2) for each in torch.split(learned, widths, 1)
    )
    share = torch.sigmoid(operands.trap.float())
    d_next_shifted = functional.pad(grads.d_next[..., :-1], (1, 0))
    return Gradients(
        grads.d_queries,
        grads.d_keys,
        grads.d_log_a,
        d_dt + share * grads.d_at_once + (1 - share) * d_next_shifted,
        (grads.d_at_once - d_next_shifted) * operands.dt * share * (1 - share),
        d_angles.sum(1),
        grads.d_x,
        grads.d_z,
        query_bias,
        key_bias,
        grads.d_skip.sum((0, 2)),
        rank_x,
        rank_z,
        rank_out,
    )


def _parts(
    problem: _Problem,
    theta: Tensor,
    do: Tensor,
    grads: _BatchGradients,
    angle_grads: list[_AngleGradients],
) -> list[Tensor]:
    """Launch the kernels of the backward that write `grads` and both sides of `angle_grads`.

    Returns:
        Gradients of parameters, `[h, ...]`: of values, queries and keys.
    """
    b, _, heads, width = problem.inputs.x.shape
    groups, rank, state = problem.inputs.keys.shape[2:]
    chunks, fp32 = problem.chunks, problem.operands.dt.new_empty
    named = {**problem.given(), "theta": theta, "do": do}
    states, gradients = (do.new_empty(b, chunks, heads, state * width) for _ in range(2))
    sums = fp32(b, chunks, heads, 3 * rank * width)
    states_kernel[(heads, b, 2)](**named, states=states, gradients=gradients, **_walking(do.device))
    if on_hopper(problem.inputs):
        from cppmega.ops.mamba3 import scan_hopper

        return scan_hopper.parts(problem, named, states, gradients, grads, angle_grads, sums)
    values_kernel[(heads, chunks, b)](
        **named, skip=problem.parameters.d.contiguous(), states=states, gradients=gradients,
        d_x=grads.d_x, d_z=grads.d_z, d_log_a=grads.d_log_a, d_at_once=grads.d_at_once,
        d_next=grads.d_next, d_skip=grads.d_skip, sums=sums, **LAUNCH,
    )  # fmt: skip
    learned = [sums.sum((0, 1))]
    sums = fp32(b, chunks, heads, rank * state)
    for keys, (own, d_rows) in enumerate(((states, grads.d_queries), (gradients, grads.d_keys))):
        rows_kernel[(chunks, groups, b)](
            **named, **angle_grads[keys]._asdict(), states=own, d_rows=d_rows, sums=sums,
            KEYS=bool(keys), **LAUNCH,
        )  # fmt: skip
        learned.append(sums.sum((0, 1)))
    return learned


def _sum_angle_gradients(problem: _Problem, angle_grads: _AngleGradients) -> tuple[Tensor, Tensor]:
    """The gradients of the angles, `[b, g, l, k]`, and of dt, from both contributions."""
    b, _, heads, _ = problem.inputs.x.shape
    angled, packed = problem.angled(), problem.packed()
    d_dt, d_angles, from_later = (torch.empty_like(each[0]) for each in angle_grads)
    sizes = {name: angled[name] for name in ("length", "chunks", "H", "K", "T")}
    later_kernel[(heads, b)](
        **packed, **sizes, d_theta=angle_grads.d_theta, from_later=from_later,
        side_stride=from_later.numel(), num_warps=1,
    )  # fmt: skip
    angles_backward_kernel[(problem.chunks, angled["G"], b)](
        **angled, **packed, from_later=from_later, da_sides=angle_grads.d_angles,
        ddt_sides=angle_grads.d_dt, d_angles=d_angles, d_dt=d_dt, angles_stride=d_angles.numel(),
        dt_stride=d_dt.numel(), num_warps=4,
    )  # fmt: skip
    return d_angles, d_dt
