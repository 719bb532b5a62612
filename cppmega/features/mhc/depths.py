"""MTP depths of a model with hyper-connections, as Megatron 0.20 feeds them.

A depth reads the streams of the decoder, or of the previous depth, instead of their contraction:
each stream is normalized and projected separately (`h_proj`), and the projection of the token
embedding (`e_proj`) is added to all of them. A depth has its own contraction before its final norm.
"""

from __future__ import annotations

from typing import Any

from megatron.core.inference.utils import InferenceMode
from megatron.core.tensor_parallel import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.spec_utils import build_module
from megatron.core.typed_torch import apply_module
from torch import Tensor

from cppmega.errors import CppmegaError
from cppmega.features.mhc import connections as mhc
from cppmega.features.mhc import layers as mhc_layers
from cppmega.features.mhc import recompute as mhc_recompute


def connect(depth: Any, tp_group: Any) -> None:
    """Give a depth two projections in place of `eh_proj`, its sites, and a contraction."""
    config = depth.config
    if not getattr(config, "enable_mhc_connections", False):
        return
    for name in ("e_proj", "h_proj"):
        projection = build_module(
            depth.submodules.eh_proj,
            config.hidden_size,
            config.hidden_size,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name=f"mtp_{name}",
            tp_group=tp_group,
        )
        setattr(depth, name, projection)
    depth.eh_proj = None
    if depth.mtp_layer_pattern is None:  # otherwise it is a stack, which has wrapped its layers
        mhc_layers.connected(depth.mtp_model_layer, config)
    mhc.add_head(depth, config)


def joined(depth: Any, streams: Tensor, decoder_input: Tensor) -> Tensor:
    """The streams `[s, b, n * C]` at the start of a depth.

    Args:
        depth: a MultiTokenPredictionLayer.
        streams: `[s, b, n * C]`, of the decoder or of the previous depth.
        decoder_input: `[s, b, C]`, embeddings of the shifted tokens.
    """
    if InferenceMode.is_active():
        raise CppmegaError(
            "no-inference",
            "An MTP depth with hyper-connections was asked to generate tokens.",
            "Speculative decoding passes hidden states, but a depth reads the streams.",
            "generate without MTP",
        )
    if depth.mtp_layer_pattern is None:  # otherwise the stack inside it begins its own
        layers = [mhc_layers.sites(depth.mtp_model_layer)]
        mhc_recompute.begin(layers, depth.config, depth.training)
    embedded, _ = depth.e_proj(apply_module(depth.enorm)(decoder_input))
    count = depth.config.mhc_num_residual_streams
    # Fold the streams into the batch: Megatron's linear layers take three axes.
    folded = mhc.split(streams, count).flatten(1, 2)
    projected, _ = depth.h_proj(apply_module(depth.hnorm)(folded))
    begun: Tensor = gather_from_tensor_model_parallel_region(
        embedded.unsqueeze(-2) + projected.unflatten(1, (-1, count)), group=depth.tp_group
    ).flatten(-2)
    if depth.sequence_parallel:
        begun = scatter_to_sequence_parallel_region(begun, group=depth.tp_group)
    return begun


def ended(depth: Any, hidden_states: Tensor) -> Tensor:
    """Hidden states `[s, b, C]` for the depth's final norm."""
    return mhc_layers.contracted(depth, hidden_states)[0]


def streams_of(block: Any, hidden_states: Tensor) -> Tensor | None:
    """The streams that the first depth reads; None if it reads the hidden states themselves."""
    if not getattr(block.config, "enable_mhc_connections", False):
        return None
    return mhc.streams_of(hidden_states)
