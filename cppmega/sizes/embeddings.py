"""Sizes of the embeddings that are added to the token embedding.

A recipe states the sizes. Patched code reads them from the environment of the ranks; where it
states none, nothing is added. This module does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from cppmega.host import env
from cppmega.sizes.stated import Count, Positive, read


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
