"""Sizes of the mixers of hybrid models.

Megatron lacks Mamba-3 and M2RNN: a recipe states their sizes, and patched code reads them in the
ranks. A stated mixer takes its letter of the hybrid pattern: `M` is Mamba-3 in place of Megatron's
Mamba-2, and `R` is M2RNN. This module does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cppmega.host import env
from cppmega.ops.common import mamba3_scan_sizes
from cppmega.sizes.stated import Positive, PositiveReal, read


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
class Mamba2:
    """Megatron's own Mamba mixers, each with a convolution over 4 tokens and a gated norm."""

    heads: Positive
    head_dim: Positive = 64
    state_dim: Positive = 128
    groups: Positive = 8

    @property
    def inner(self) -> int:
        """The width of all heads."""
        return self.heads * self.head_dim


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
