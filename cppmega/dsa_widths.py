"""Which widths of DSA's absorbed queries and values the fused kernels take.

Megatron declines others without a word, and then computes all scores in fp32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cppmega.recipe import Recipe

Widths = tuple[int, int]
"""Of a query (latent and rotated part) and of a value (the latent part)."""

RELEASED: tuple[Widths, ...] = ((576, 512),)
WIDENED: tuple[Widths, ...] = ((128, 64), (192, 128))
"""Taken by the backend tilelang with the patch `PATCH`."""
PATCH = "dsa_sparse_mla_widths"


def of(recipe: Recipe) -> Widths:
    """A recipe's widths."""
    latent = recipe.kv_lora_rank or 0
    return latent + (recipe.qk_pos_emb_head_dim or 0), latent


def taken(backend: str | None, patched: bool) -> tuple[Widths, ...]:
    """What a backend of Megatron's runs fused; `patched`: with the patch in the code."""
    if backend in (None, "none"):
        return ()
    return (*WIDENED, *RELEASED) if backend == "tilelang" and patched else RELEASED
