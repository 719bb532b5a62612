"""Sizes of the embeddings that are added to the token embedding, and what they cannot combine with.

A recipe states the sizes. Patched code reads them from the environment of the ranks; where it
states none, nothing is added. This module does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cppmega.errors import CppmegaError
from cppmega.features.environment_sizes import Count, Positive, read
from cppmega.host import env
from cppmega.host.cuda_graphs import cuda_graphs


@dataclass(frozen=True, slots=True)
class NgramHash:
    """Hashed n-gram embeddings added to the token embedding."""

    orders: tuple[Positive, ...] = (2, 3)
    heads: Positive = 8
    tables: tuple[Positive, ...] = (
        *(499_801, 499_819, 499_853, 499_879, 499_883, 499_897, 499_903, 499_927),
        *(499_943, 499_957, 499_969, 499_973, 499_979, 500_009, 500_029, 500_041),
    )
    """Rows of each table, one table per order and head: 16 primes around 500,000."""
    dim: Positive = 16
    seed: Count = 20_141
    """Seed of the multipliers, which a checkpoint keeps, and of the tables' initial values."""

    @property
    def problem(self) -> str:
        """Why the sizes contradict each other; empty if they do not."""
        wanted = len(self.orders) * self.heads
        if len(self.tables) != wanted:
            return f"{len(self.tables)} tables for {wanted} pairs of order and head"
        return ""


@dataclass(frozen=True, slots=True)
class Structure:
    """Embeddings of the kind and depth of the construct that a token of source code is in."""

    categories: Positive = 9
    levels: Positive = 16
    bottleneck: Positive = 64
    seed: Count = 20_142
    """Seed of the initial values of its two tables."""


def ngram_hash(environ: Mapping[str, str] = os.environ) -> NgramHash | None:
    """The n-gram hash of the model being built; None if it has none.

    Raises:
        CppmegaError: `sizes-misstated`.
    """
    return read(env.NGRAM_HASH, NgramHash, environ)


def structure(environ: Mapping[str, str] = os.environ) -> Structure | None:
    """The structure embedding of the model being built; None if it has none.

    Raises:
        CppmegaError: `sizes-misstated`.
    """
    return read(env.STRUCTURE, Structure, environ)


def asked_for(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether anything is added to the token embedding.

    Raises:
        CppmegaError: `sizes-misstated`.
    """
    return ngram_hash(environ) is not None or structure(environ) is not None


def obstacles(args: Any) -> Iterator[CppmegaError]:
    """Yield an error for each option of a run or a model that rules out the embeddings.

    Args:
        args: either of the two; an option that it lacks counts as off.
    """

    def has(name: str) -> Any:
        return getattr(args, name, None)

    if (has("context_parallel_size") or 1) > 1:
        yield _unsupported("context parallelism", "An n-gram would miss the tokens of other ranks.")
    if has("use_megatron_fsdp") or has("use_torch_fsdp2"):
        yield _unsupported(
            "FSDP", "The copy of the MTP stage would get a part of the gradient of another part."
        )
    if has("use_mup"):
        yield _unsupported(
            "MuP", "How their learning rates scale with the width has not been derived."
        )
    if has("overlap_moe_expert_parallel_comm"):
        yield _unsupported(
            "--overlap-moe-expert-parallel-comm",
            "Its schedule calls the MTP depths without the context of their tokens.",
        )
    if cuda_graphs(args) == "full_iteration":
        yield _unsupported(
            "--cuda-graph-impl full_iteration",
            "The graph replays copies of the tokens, and what is attached to them is not copied.",
        )
    if has("mtp_num_layers") and has("pipeline_model_parallel_layout"):
        yield _unsupported(
            "a pipeline layout with MTP depths",
            "The copies of the parameters are expected in the first and in the last stage.",
        )
    if has("init_model_with_meta_device"):
        yield _unsupported(
            "a model built on the meta device", "Their weights would not be initialized."
        )


def _unsupported(what: str, why: str) -> CppmegaError:
    return CppmegaError(
        "input-embeddings-not-supported",
        f"The model has n-gram or structure embeddings together with {what}.",
        why,
        f"leave out {what}, or train with --set ngram_hash=None --set structure=None",
    )
