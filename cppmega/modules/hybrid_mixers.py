"""Layers of hybrid stacks with mixers of cppmega's: what the page own_mixers calls.

A layer is Megatron's `MambaLayer`, with its norm, residual and place in the stack, around the mixer
that the sizes of the letter ask for.
"""

from __future__ import annotations

from typing import Any

from megatron.core.extensions import transformer_engine as te
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec

from cppmega.errors import CppmegaError
from cppmega.modules import mixer_sizes
from cppmega.modules.m2rnn import M2RNNMixer
from cppmega.modules.mamba3 import Mamba3Mixer


def layer_spec(stock: Any, letter: str) -> Any:
    """The spec of a layer `M` or `R`.

    Args:
        stock: the stack's own spec of its Mamba layers, which `M` keeps where no sizes of Mamba-3
            are stated, and from which others have their linear layers, norm and residual.
        letter: of the layer.

    Raises:
        CppmegaError: `mixer-without-sizes`, `sizes-misstated`.
    """
    if letter == "M":
        sizes = mixer_sizes.mamba3()
        return stock if sizes is None else _around(Mamba3Mixer, sizes, stock)
    matrix = mixer_sizes.m2rnn()
    if matrix is None:
        raise CppmegaError(
            "mixer-without-sizes",
            f"The pattern has a layer {letter}, and no sizes of its mixer are stated.",
            "The model would have another layer in its place, or none.",
            "train from a recipe with the field m2rnn",
        )
    return _around(M2RNNMixer, matrix, stock)


def _around(mixer: type, sizes: Any, stock: Any) -> ModuleSpec:
    """A layer of the stack's own kinds of linear layer and norm, with its norm apart."""
    given = stock.submodules
    linear, norm = given.mixer.submodules, given.norm
    if linear.in_proj is te.TELayerNormColumnParallelLinear:  # holds the norm of Mamba-2's layer
        linear = MambaMixerSubmodules(te.TEColumnParallelLinear, linear.out_proj)
        norm = te.TENorm
    return ModuleSpec(
        module=MambaLayer,
        submodules=MambaLayerSubmodules(
            norm=norm,
            mixer=ModuleSpec(module=mixer, params={"sizes": sizes}, submodules=linear),
            mamba_bda=given.mamba_bda,
        ),
    )
