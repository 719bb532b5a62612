"""Specs of DSA layers whose attention has a key per head, of those with one latent key.

Megatron's `MLASelfAttention` has the parameters of `AbsorbedMLASelfAttention`, by the same names
and in the same layout, and gives DSA's core attention what it needs, so that exchanging the class
is all there is to do.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any


def layer_spec(spec: Any) -> Any:
    """The spec of a layer, or of its attention, with a key per head.

    Args:
        spec: a `ModuleSpec` of a transformer layer with DSA, or of its self-attention.

    Returns:
        A copy; specs in which no attention is absorbed are returned as they are.
    """
    from megatron.core.transformer.experimental_attention_variant import absorbed_mla
    from megatron.core.transformer.multi_latent_attention import (
        MLASelfAttention,
        MLASelfAttentionSubmodules,
    )

    parts = spec.submodules
    if (own := getattr(parts, "self_attention", None)) is not None:
        return replace(spec, submodules=replace(parts, self_attention=layer_spec(own)))
    if spec.module is not absorbed_mla.AbsorbedMLASelfAttention:
        return spec
    parts = MLASelfAttentionSubmodules(
        **{field.name: getattr(parts, field.name) for field in fields(parts)}
    )
    return replace(spec, module=MLASelfAttention, submodules=parts)
