"""Add Mamba-3 and M2RNN layers to hybrid stacks of 0.19 and main.

What: With `CPPMEGA_MAMBA3`, which the trainer sets from the recipe's field `mamba3`, the letter `M`
    of a hybrid pattern denotes a layer with a Mamba-3 mixer instead of Mamba-2's; with
    `CPPMEGA_M2RNN`, `R` denotes one with M2RNN's. Both are Megatron's `MambaLayer`, with its own
    norm, around one of cppmega's mixers, in the trunk, across `|` and in MTP depths; other letters
    and the class of the model are unchanged. The function that computes Mamba-3's A from a token
    (`softplus` as in mamba-ssm 2.3.2.post1, or `heavy_tail` as on its main branch) is part of the
    sizes, and a checkpoint with the other one is refused. FSDP, MuP, inference and CUDA graphs of
    the mixers other than Megatron's own (`--cuda-graph-impl local`) are refused by name.
    Tensor-parallel and context-parallel ranks share out the heads of both; with context
    parallelism, each computes complete sequences. In FP8, M2RNN's projections stay in bf16.
    Megatron's own FLOP count treats `M` as Mamba-2 and omits `R`; the recipe's counts both as
    built.
Why: NAM56R is built from both, and no release of Megatron has either. The M2RNN authors'
    convolution mixes the documents of a pack, and a random draw of zero made the logarithm of its
    decay infinite. Small parameters (dt, D, biases of keys and queries, factors of ranks, the
    decay) stay in fp32, which `float16_keep_fp32` enables the optimizers to save.
Upstream: Not sent: Megatron accepts mixers whose kernels are in a released package, and these are
    cppmega's; mamba-ssm's compute mixers with an output norm, and SISO on other GPUs than Hopper's.
Remove: when Megatron has both mixers, with the same parameters.
Numerics: changes results only of models with one of the variables; without them, none (bitwise).
"""

from __future__ import annotations

from cppmega.catalogue.megatron_args import has_own_mixers
from cppmega.edits import in_order, inserting, replacing
from cppmega.errors import CppmegaError
from cppmega.page import Edit, Patch, Source
from cppmega.sizes import mixers as mixer_sizes
from cppmega.sizes import stated as environment_sizes

ALLOCATION = "megatron/core/models/hybrid/hybrid_layer_allocation.py"
STACK = "megatron/core/models/hybrid/hybrid_block.py:HybridStack.__init__"
ONLY_IN_0_19 = (
    "megatron/core/transformer/multi_token_prediction.py:"
    "MultiTokenPredictionLayer.get_inner_quantization_context"
)


def _cppmega_layer_spec(stock, letter):
    """The spec of a layer M or R."""
    from cppmega.features.mixers.hybrid import layer_spec

    return layer_spec(stock, letter)


PATCH = Patch(
    purpose="feature",
    edits=(
        Edit(
            target=f"{ALLOCATION}:Symbols",
            pins={"0.19.2": "d1935be4b67e54fa", "main-d98e8a64": "d1935be4b67e54fa"},
            edit=in_order(
                inserting('M2RNN = "R"', before="ATTENTION = '*'"),
                replacing(
                    "{MAMBA, GDN, ATTENTION, DS_ATTENTION, MLA, MLP, MOE}",
                    "{MAMBA, GDN, M2RNN, ATTENTION, DS_ATTENTION, MLA, MLP, MOE}",
                ),
            ),
            mark="",
        ),
        Edit(
            target=STACK,
            pins={"0.19.2": "1008fcf6068c752f", "main-d98e8a64": "2d7b4b530606eec4"},
            edit=in_order(
                replacing(
                    "layer_type == LayerSymbols.MAMBA",
                    "layer_type in (LayerSymbols.MAMBA, LayerSymbols.M2RNN)",
                ),
                replacing(
                    "submodules.mamba_layer",
                    "_cppmega_layer_spec(submodules.mamba_layer, layer_type)",
                ),
            ),
            helpers=(_cppmega_layer_spec,),
        ),
    ),
    reached="startup",
    when=has_own_mixers,
    builds_on=(ONLY_IN_0_19,),
    wanted_by=lambda recipe: recipe.has_own_mixers,
    after=("mhc_connections",),
)


def fixed_upstream(source: Source) -> bool:
    return "M2RNN" in source.text(f"{ALLOCATION}:Symbols")


def verify() -> None:
    import os
    from unittest import mock

    import torch
    from megatron.core.tensor_parallel import random

    from cppmega.proof import small_models

    # With its gate on, `mamba_layer_recompute` saves RNG states, which needs a GPU.
    mock.patch.object(random, "_get_cuda_rng_state", return_value=None).start()
    mock.patch.object(random, "_set_cuda_rng_state").start()
    sizes = mixer_sizes.Mamba3(head_dim=4, state_dim=8, groups=2, rank=2, chunk=4)
    with mock.patch.dict(os.environ, {"CPPMEGA_MAMBA3": environment_sizes.text(sizes)}):
        try:
            model = small_models.hybrid(pattern="M*M-")
        except ImportError as error:  # a package that Megatron's Mamba-2 mixer needs
            raise AssertionError("M is a Mamba-2 mixer") from error
        given = small_models.arguments(model)
        before = model(**given)
        before.sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
        mixers = [layer.mixer for layer in (model.decoder.layers[0], model.decoder.layers[2])]
        with torch.no_grad():
            for mixer in mixers:
                mixer.D.zero_()
        assert not torch.equal(model(**given), before), "a mixer is not called"
        try:
            small_models.hybrid(pattern="R-")
        except CppmegaError as error:
            assert error.name == "sizes-misstated", error
        else:
            raise AssertionError("a layer without sizes was built")
