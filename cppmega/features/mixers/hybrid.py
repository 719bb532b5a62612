"""Layers of hybrid stacks with cppmega's mixers, for the page own_mixers.

A layer is Megatron's `MambaLayer`, with its norm, residual and position in the stack, around the
mixer whose sizes are stated for the letter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.extensions import transformer_engine as te
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec

from cppmega.errors import CppmegaError
from cppmega.features.mixers.m2rnn import M2RNNMixer
from cppmega.features.mixers.mamba3 import Mamba3Mixer
from cppmega.features.mixers.padded_columns import padded_columns
from cppmega.sizes import mixers as mixer_sizes


def layer_spec(stock: Any, letter: str) -> Any:
    """The spec of a layer `M` or `R`.

    Args:
        stock: the stack's own spec of its Mamba layers: `M` keeps it where no sizes of Mamba-3
            are stated, and other mixers take their linear layers, norm and residual from it.
        letter: the layer's letter in the pattern.

    Raises:
        CppmegaError: `sizes-misstated`.
    """
    if letter == "M":
        sizes = mixer_sizes.mamba3()
        return stock if sizes is None else _around(Mamba3Mixer, sizes, stock)
    matrix = mixer_sizes.m2rnn()
    if matrix is None:
        raise CppmegaError(
            "sizes-misstated",
            f"The pattern has a layer {letter}, and no sizes of its mixer are stated.",
            "Another layer, or none, would be built instead.",
            "train from a recipe with the field m2rnn",
        )
    return _around(M2RNNMixer, matrix, stock, padded_columns)


def _around(
    mixer: type, sizes: Any, stock: Any, projected: Callable[[type], type] = lambda kind: kind
) -> ModuleSpec:
    """A layer with the stack's kinds of linear layer and norm; the norm is a separate module.

    Args:
        mixer: the mixer's class.
        sizes: its sizes.
        stock: the stack's own spec of its Mamba layers.
        projected: derives the class of its first linear layer from the stack's.
    """
    given = stock.submodules
    linear, norm = given.mixer.submodules, given.norm
    if linear.in_proj is te.TELayerNormColumnParallelLinear:  # includes the norm of Mamba-2's layer
        linear = MambaMixerSubmodules(te.TEColumnParallelLinear, linear.out_proj)
        norm = te.TENorm
    linear = MambaMixerSubmodules(projected(linear.in_proj), linear.out_proj)
    return ModuleSpec(
        module=MambaLayer,
        submodules=MambaLayerSubmodules(
            norm=norm,
            mixer=ModuleSpec(module=mixer, params={"sizes": sizes}, submodules=linear),
            mamba_bda=given.mamba_bda,
        ),
    )
