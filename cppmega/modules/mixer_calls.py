"""What a mixer of cppmega's accepts when Megatron's layer calls it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cppmega.errors import CppmegaError


def refuse_inference(*contexts: Any) -> None:
    """Check that a mixer is called for training.

    Raises:
        CppmegaError: `mixer-no-inference`.
    """
    if any(context is not None for context in contexts):
        raise CppmegaError(
            "mixer-no-inference",
            "A Mamba-3 or M2RNN layer was called with the caches of an inference.",
            "The mixers begin every sequence anew; the tokens before it would be forgotten.",
            "evaluate whole sequences, as the trainer does",
        )


def boundaries(packed_seq_params: Any) -> Tensor | None:
    """Cumulative lengths of a pack's documents, int32 `[documents + 1]`; None: there is no pack."""
    if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
        return None
    padded: Tensor | None = packed_seq_params.cu_seqlens_q_padded
    own: Tensor | None = packed_seq_params.cu_seqlens_q
    return own if padded is None else padded
