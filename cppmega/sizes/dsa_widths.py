"""Widths of DSA's absorbed queries and values that the fused kernels support.

Megatron silently declines other widths, and then computes all scores in fp32.
"""

from __future__ import annotations

from collections.abc import Iterable

Widths = tuple[int, int]
"""Widths of a query (latent and rotated part) and of a value (the latent part)."""

RELEASED: tuple[Widths, ...] = ((576, 512),)
TILELANG = "dsa_widths_tilelang"
"""Name under which a page provides further widths for the backend tilelang."""
ATTENTION = "dsa_sparse_attention"
"""Name under which a page provides attention of any widths, for every backend but cudnn."""


def supported(backend: str | None, widened: Iterable[Widths] = ()) -> tuple[Widths, ...]:
    """The widths that a backend of Megatron's runs fused.

    Args:
        backend: Megatron's name; None or `none` is the unfused path.
        widened: what pages provide as `TILELANG`.
    """
    if backend in (None, "none"):
        return ()
    return tuple(dict.fromkeys((*widened, *RELEASED))) if backend == "tilelang" else RELEASED
