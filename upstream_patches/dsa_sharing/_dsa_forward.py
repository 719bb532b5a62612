"""Edits through which DSA layers find the forward pass that they run in."""

from __future__ import annotations

from cppmega.edits import inserting, replacing

OPENS = ("from cppmega.features.dsa.forward import forward as _cppmega_forward",)
BINDS = ("from cppmega.features.dsa.forward import bound as _cppmega_bound",)

OPENED_BY_BLOCK = replacing(
    "with rng_context, outer_quantization_context:",
    "with _cppmega_forward(), rng_context, outer_quantization_context:",
)
OPENED_BY_STACK = replacing(
    "with outer_fp8_context:", "with _cppmega_forward(), outer_fp8_context:"
)
BOUND = replacing(
    "CheckpointFunction.apply(function, distribute_saved_activations, *args)",
    "CheckpointFunction.apply(_cppmega_bound(function), distribute_saved_activations, *args)",
)
BOUND_BY_TE = inserting(
    "forward_func = _cppmega_bound(forward_func)",
    before="from transformer_engine.pytorch.distributed import checkpoint",
)
