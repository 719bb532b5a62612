"""Transformer Engine layers that stay in bf16 inside an FP8 model."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any


def bf16_weights(config: Any) -> AbstractContextManager[Any]:
    """Build the layers in the context with weights in the type of the parameters.

    Args:
        config: Megatron's TransformerConfig; with `fp8_param`, the surrounding layers have FP8
            weights.
    """
    if not (config.fp8 and config.fp8_param):
        return nullcontext()
    off: AbstractContextManager[Any] = _engine().fp8_model_init(enabled=False)
    return off


def bf16_products(config: Any) -> AbstractContextManager[Any]:
    """Run the layers in the context without FP8; the enclosing FP8 context resumes afterwards.

    Args:
        config: Megatron's TransformerConfig; with `fp8`, the surrounding layers multiply in FP8.
    """
    if not config.fp8:
        return nullcontext()
    from megatron.core.fp8_utils import get_fp8_recipe

    # Pass the run's recipe: without one, Transformer Engine reports delayed scaling.
    off: AbstractContextManager[Any] = _engine().fp8_autocast(
        enabled=False, fp8_recipe=get_fp8_recipe(config)
    )
    return off


def _engine() -> Any:
    return importlib.import_module("transformer_engine.pytorch")
