"""Sizes of the mixers that Megatron lacks, and the options that they cannot be combined with.

A recipe states the sizes, and patched code reads them in the ranks. A stated mixer takes its letter
of the hybrid pattern: `M` is Mamba-3 in place of Megatron's Mamba-2, and `R` is M2RNN. This module
does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cppmega.errors import CppmegaError
from cppmega.features.environment_sizes import Positive, PositiveReal, read
from cppmega.host import env
from cppmega.host.cuda_graphs import captures, cuda_graphs
from cppmega.ops.common import mamba3_scan_sizes


@dataclass(frozen=True, slots=True)
class Mamba3:
    """Mamba-3 mixers, of rank 1 (SISO) or higher (MIMO)."""

    expand: Positive = 2
    head_dim: Positive = 64
    state_dim: Positive = 128
    groups: Positive = 8
    rank: Positive = 4
    chunk: Positive = 16
    """Tokens that a kernel computes together; affects results only by rounding."""
    rope_fraction: float = 0.5
    """The fraction of a state that is rotated: a half or all of it."""
    out_norm: bool = False
    """Whether there is a norm per head before the gate."""
    definition: Literal["softplus", "heavy_tail"] = "softplus"
    """Definition of A; see `cppmega.ops.mamba3.naive`."""

    @property
    def problem(self) -> str:
        """Why the sizes contradict each other; empty if they do not."""
        if self.rope_fraction not in (0.5, 1.0):
            return f"rope_fraction={self.rope_fraction}, which must be 0.5 or 1.0"
        if self.angles == 0 or self.state_dim % 4:
            return f"state_dim={self.state_dim}, which must be a multiple of 4"
        return ""

    @property
    def angles(self) -> int:
        """The number of rotated pairs in a state."""
        return int(self.state_dim * self.rope_fraction) // 2

    def heads(self, hidden: int) -> int:
        """The number of heads in a model of that width."""
        return self.expand * hidden // self.head_dim

    def scan_obstacle(self, hidden: int) -> str:
        """Why cppmega's own scan does not support a model of that width, as half a sentence, so
        that mamba-ssm's kernels do the work; empty if it does."""
        return mamba3_scan_sizes.obstacle(
            heads_per_group=self.heads(hidden) // self.groups,
            rank=self.rank,
            state=self.state_dim,
            width=self.head_dim,
            angles=self.angles,
            out_norm=self.out_norm,
        )


@dataclass(frozen=True, slots=True)
class M2RNN:
    """Matrix-state RNN mixers: one query head, one key head, and one value head per
    `key_dim + value_dim` of the model's width."""

    key_dim: Positive = 64
    value_dim: Positive = 16
    conv: Positive = 4
    gradient_clipping: PositiveReal | None = 1.0
    """The largest element of a state's gradient, in each step of the backward; None: any. See
    `cppmega.ops.m2rnn.naive`."""

    def heads(self, hidden: int) -> int:
        """The number of value heads in a model of that width."""
        return hidden // (self.key_dim + self.value_dim)


def mamba3(environ: Mapping[str, str] = os.environ) -> Mamba3 | None:
    """The Mamba-3 mixers of the model being built; None: `M` is Megatron's Mamba-2.

    Raises:
        CppmegaError: `sizes-misstated`.
    """
    return read(env.MAMBA3, Mamba3, environ)


def m2rnn(environ: Mapping[str, str] = os.environ) -> M2RNN | None:
    """The M2RNN mixers of the model being built; None if it has none.

    Raises:
        CppmegaError: `sizes-misstated`.
    """
    return read(env.M2RNN, M2RNN, environ)


def obstacles(args: Any, environ: Mapping[str, str] = os.environ) -> Iterator[CppmegaError]:
    """Yield an error for each option of a run or a model that rules out the mixers.

    Args:
        args: either of the two; an option that it lacks counts as off.
        environ: where the sizes are stated.

    Raises:
        CppmegaError: `sizes-misstated`.
    """
    mamba, matrix = mamba3(environ), m2rnn(environ)
    if mamba is None and matrix is None:
        return
    yield from _general(args)
    if mamba is not None:
        yield from _of_mamba3(mamba, args)
    if matrix is not None:
        yield from _of_m2rnn(matrix, args)


def _general(args: Any) -> Iterator[CppmegaError]:
    def has(name: str) -> Any:
        return getattr(args, name, None)

    if (has("context_parallel_size") or 1) > 1:
        yield _unsupported("context parallelism", "A state would miss the tokens of other ranks.")
    if has("use_megatron_fsdp") or has("use_torch_fsdp2"):
        yield _unsupported("FSDP", "It has not been tested with parameters that stay fp32.")
    if has("use_mup"):
        yield _unsupported(
            "MuP", "How the mixers' learning rates scale with the width has not been derived."
        )
    if has("init_model_with_meta_device"):
        yield _unsupported(
            "a model built on the meta device", "Their weights would not be initialized."
        )
    if has("fp32_residual_connection"):
        yield _unsupported("--fp32-residual-connection", "It has not been tested.")
    if captures(args, "mamba"):
        yield _unsupported(
            f"CUDA graphs of Mamba layers ({cuda_graphs(args)})",
            "Capturing these mixers has not been tested.",
            "--cuda-graph-impl none, or name other parts of layers in --cuda-graph-modules",
        )


def _of_mamba3(sizes: Mamba3, args: Any) -> Iterator[CppmegaError]:
    hidden: int | None = getattr(args, "hidden_size", None)
    if hidden is None:
        return
    if sizes.expand * hidden % sizes.head_dim or sizes.heads(hidden) % sizes.groups:
        yield CppmegaError(
            "mamba3-heads",
            f"{sizes.expand} x {hidden} channels cannot be split into heads of {sizes.head_dim} in "
            f"{sizes.groups} groups of equal size.",
            "Every group of keys and queries serves the same number of heads.",
            "another head_dim, expand or groups in the recipe's field mamba3",
        )
    ranks = getattr(args, "tensor_model_parallel_size", 1) or 1
    if sizes.groups % ranks:
        yield CppmegaError(
            "mamba3-tensor-parallel",
            f"{sizes.groups} groups of Mamba-3 cannot be split over {ranks} tensor-parallel ranks.",
            "A rank holds complete groups, with the heads that they serve.",
            "a tensor_model_parallel_size that divides the groups",
        )


def _of_m2rnn(sizes: M2RNN, args: Any) -> Iterator[CppmegaError]:
    hidden: int | None = getattr(args, "hidden_size", None)
    if hidden is not None and sizes.heads(hidden) < 1:
        yield CppmegaError(
            "m2rnn-heads",
            f"A width of {hidden} is less than a key of {sizes.key_dim} and a value of "
            f"{sizes.value_dim}.",
            "The mixer would have no head.",
            "a smaller key_dim or value_dim in the recipe's field m2rnn",
        )
    if getattr(args, "fp4", None):
        yield _unsupported(
            "--fp4-format", "The width of M2RNN's projection is not a multiple of 16."
        )
    if getattr(args, "fp8", None) and getattr(args, "fp8_recipe", None) == "delayed":
        yield _unsupported(
            "--fp8-recipe delayed", "One context is around all layers, and M2RNN's stay in bf16."
        )
    if getattr(args, "fp16", None) and sizes.gradient_clipping is not None:
        yield _unsupported(
            "--fp16", "M2RNN's gradient_clipping would clip gradients times the scale of the loss."
        )
    ranks = getattr(args, "tensor_model_parallel_size", 1) or 1
    if ranks > 1:
        yield CppmegaError(
            "m2rnn-tensor-parallel",
            f"M2RNN layers cannot run on {ranks} tensor-parallel ranks.",
            "All heads share a query and a key, and their number is seldom a multiple of the "
            "ranks; the layer is neither sharded nor replicated over ranks.",
            "tensor_model_parallel_size=1, or a pattern without R",
        )


DECAY = "mixer.decay_"
"""End of the name of a Mamba-3 mixer's buffer in a checkpoint, before the definition."""


def other_models(
    saved: Mapping[str, tuple[int, ...]], environ: Mapping[str, str] = os.environ
) -> Iterator[CppmegaError]:
    """Yield the reason why a run cannot resume from a checkpoint with other Mamba-3 mixers.

    Args:
        saved: names and shapes of the checkpoint's tensors; empty: the run does not resume.
        environ: where the sizes are stated.

    Raises:
        CppmegaError: `sizes-misstated`.
    """
    found = {name.partition(DECAY)[2] for name in saved if DECAY in name}
    sizes = mamba3(environ)
    wanted = {sizes.definition} if sizes is not None else set()
    if saved and found != wanted:
        names = [", ".join(sorted(each)) or "no Mamba-3" for each in (found, wanted)]
        yield CppmegaError(
            "mamba3-other-definition",
            f"The checkpoint's Mamba-3 layers compute A by {names[0]}; this run's, by {names[1]}.",
            "The parameters have the same names and shapes, but define a different model.",
            "give the recipe's field mamba3 the definition of the run that saved it",
        )


def _unsupported(what: str, why: str, instead: str = "") -> CppmegaError:
    return CppmegaError(
        "mixer-not-supported",
        f"The model has Mamba-3 or M2RNN layers together with {what}.",
        why,
        f"{instead or f'leave out {what}'}, or train a pattern without M and R",
    )
