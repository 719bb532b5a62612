"""The requirements of proofs, and whether this machine meets them."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from cppmega.page import Page

_MODULES = {"te": "transformer_engine"}
"""Needs whose module has a different name."""


def missing_needs(needs: Sequence[str]) -> list[str]:
    """Return the needs of a page that this machine does not have."""
    return [need for need in needs if not _is_here(need)]


def uses_gpu(page: Page) -> bool:
    """Whether the proof of a page runs on a GPU."""
    return any(map(_is_gpu, page.patch.needs))


def _is_gpu(need: str) -> bool:
    return need == "cuda" or need.startswith("sm_")


def _is_here(need: str) -> bool:
    if need == "cpu":
        return True
    if not _is_gpu(need):
        return importlib.util.find_spec(_MODULES.get(need, need)) is not None
    import torch

    if not torch.cuda.is_available():
        return False
    major, minor = torch.cuda.get_device_capability()
    return need in ("cuda", f"sm_{major}{minor}")
