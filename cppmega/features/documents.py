"""The documents of a pack, as Megatron describes them."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def boundaries(packed_seq_params: Any) -> Tensor | None:
    """Cumulative lengths of a pack's documents, int32 `[documents + 1]`; None if not packed."""
    if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
        return None
    padded: Tensor | None = packed_seq_params.cu_seqlens_q_padded
    own: Tensor | None = packed_seq_params.cu_seqlens_q
    return own if padded is None else padded
