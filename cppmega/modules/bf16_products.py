"""Layers of Transformer Engine that stay in bf16 inside of a model in FP8."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any


def bf16_weights(config: Any) -> AbstractContextManager[Any]:
    """Build the layers inside with weights in the type of the parameters.

    Args:
        config: Megatron's TransformerConfig; with `fp8_param`, layers around have FP8 weights.
    """
    if not (config.fp8 and config.fp8_param):
        return nullcontext()
    off: AbstractContextManager[Any] = _engine().fp8_model_init(enabled=False)
    return off


def bf16_products(config: Any) -> AbstractContextManager[Any]:
    """Run the layers inside without FP8; the one around them goes on afterwards.

    Args:
        config: Megatron's TransformerConfig; with `fp8`, layers around multiply in FP8.
    """
    if not config.fp8:
        return nullcontext()
    from megatron.core.fp8_utils import get_fp8_recipe

    # With the recipe of the run: asked without one, Transformer Engine answers delayed scaling.
    off: AbstractContextManager[Any] = _engine().fp8_autocast(
        enabled=False, fp8_recipe=get_fp8_recipe(config)
    )
    return off


def _engine() -> Any:
    return importlib.import_module("transformer_engine.pytorch")
