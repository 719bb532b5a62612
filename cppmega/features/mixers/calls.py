"""Common parts of cppmega's mixers: their projections, and checks of a layer's arguments."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.spec_utils import build_module

from cppmega.errors import CppmegaError


def projections(
    config: Any, submodules: Any, widths: tuple[int, int, int], tp_group: Any, name: str | None
) -> tuple[Any, Any]:
    """Build the linear layers before and after a mixer, without biases.

    Args:
        config: Megatron's TransformerConfig.
        submodules: has `in_proj` and `out_proj`, a column- and a row-parallel linear layer.
        widths: the widths of the model, of the projection, and of the mixer's result.
        tp_group: the tensor-parallel group that shares both.
        name: the name of the mixer, as Megatron passes it down.
    """
    model, projected, mixed = widths
    common = {"config": config, "bias": False, "is_expert": False, "tp_group": tp_group}
    before = build_module(
        submodules.in_proj,
        *(model, projected),
        init_method=config.init_method,
        gather_output=False,
        skip_bias_add=False,
        tp_comm_buffer_name="fc1",
        name=f"{name}.in_proj" if name is not None else None,
        **common,
    )
    after = build_module(
        submodules.out_proj,
        *(mixed, model),
        init_method=config.output_layer_init_method,
        input_is_parallel=True,
        skip_bias_add=True,
        tp_comm_buffer_name="fc2",
        name=f"{name}.out_proj" if name is not None else None,
        **common,
    )
    return before, after


def refuse_inference(*contexts: Any) -> None:
    """Check that a mixer is called for training.

    Raises:
        CppmegaError: `no-inference`.
    """
    if any(context is not None for context in contexts):
        raise CppmegaError(
            "no-inference",
            "A Mamba-3 or M2RNN layer was called with inference caches.",
            "The mixers start every sequence from zero states; earlier tokens would be forgotten.",
            "evaluate complete sequences, as the trainer does",
        )
