"""Add manifold-constrained hyper-connections (mHC) to GPT and hybrid models of 0.19 and main.

What: With `--enable-mhc-connections` a model has `--mhc-num-residual-streams` residual streams,
    which every sub-layer reads and writes through learned weights (arXiv 2512.24880). The options,
    the parameters and their shapes are those of 0.20 (the names of the dev branch are accepted,
    too): layers of a hybrid stack are wrapped, layers of a GPT model have two sites, MTP depths
    read the streams, and pipeline stages pass all of them on. The definition is that of
    `cppmega/ops/mhc/naive.py`, which also computes it, unless `--use-fused-mhc` selects the kernels
    of `cppmega/ops/mhc`; a run that requests the kernels and cannot use them stops.
    `--recompute-modules mhc` keeps the streams with which a block of layers begins
    (`--mhc-recompute-layer-num`; of a model's first block the embeddings, of which its streams are
    copies) and recomputes the others. A block needs all its streams at once in the backward pass,
    so several blocks lower the peak of a deep model. Hidden dropout leaves out values of each
    stream separately, as in dev; recomputation repeats its random numbers, and `--use-fused-mhc`
    computes the ends of sites without kernels where there is dropout. Features that mHC does not
    support are refused by name. In the first step no gradient of the mapping is exactly zero; the
    gradients that are zero are the same as without mHC: those of embeddings of tokens that the
    batch lacks (and of parts of the bias of all keys, whose gradient is rounding error). The
    gradient of the first site's mixing matrix has the size of rounding errors, because its streams
    are still equal and its columns sum to 1; where a norm follows, the gradient of its input's
    weights is small, because the norm cancels their common scale. Parameters of the mapping stay in
    fp32, which `float16_keep_fp32` enables the optimizers to save.
Why: No release has them: 0.20 is announced with them, for hybrid models, but without pipeline
    stages, full recomputation and graphs.
Upstream: https://github.com/NVIDIA/Megatron-LM/pull/4531 (main, not released),
    https://github.com/NVIDIA/Megatron-LM/pull/6401 (main, not released),
    https://github.com/NVIDIA/Megatron-LM/pull/3828 (dev) and
    https://github.com/NVIDIA/Megatron-LM/pull/4949 (dev). Main of August 2026 has a class of GPT
    layers with another definition (mixing not transposed, a clamp, mean contraction), which only a
    script's own specification names. A model with these layers keeps them, with main's limits; a
    checkpoint of one lacks the head, and so is refused. Dev's connections stay, too.
Remove: with 0.20, where it runs what this page does, and its kernels are as fast.
Numerics: changes results: with the option, the model is a different one. Without it nothing changes
    (bitwise).
"""

from __future__ import annotations

from typing import Any

from cppmega.page import Patch, Source

from ._mhc_edits import CORE, EDITS, PRESENT

HYBRID = f"{CORE}/models/hybrid/hybrid_block.py"


def uses_mhc(args: Any) -> bool:
    """Whether a run's model has hyper-connections."""
    return bool(getattr(args, "enable_mhc_connections", False))


PATCH = Patch(
    purpose="feature",
    edits=EDITS,
    reached="forward",
    when=uses_mhc,
    builds_on=(PRESENT,),
    wanted_by=lambda recipe: recipe.uses_mhc,
    after=(
        *("cross_entropy_fusion_linear", "dsa_index_share_checkpoints", "dsa_index_share_holder"),
        "te_graphs_hybrid_mtp",
    ),
)


def fixed_upstream(source: Source) -> bool:
    # Main has had them for a class of GPT layers that nothing builds, without stages and depths.
    return "HyperConnectionHybridLayer(" in source.file(HYBRID)


def verify() -> None:
    import dataclasses

    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    from cppmega.proof import small_models

    options = {"enable_mhc_connections": True, "mhc_num_residual_streams": 2}
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    if "enable_hyper_connections" in fields:
        options = {"enable_hyper_connections": True, "num_residual_streams": 2}  # dev
    # Dev compiles its own: half a minute for products of which none is measured here.
    with torch._dynamo.config.patch(disable=True):
        for make in (small_models.gpt, small_models.hybrid):
            model = make(**options)
            names = {name for name, _ in model.named_parameters()}
            assert any("hyper_connection.mapping_proj.weight" in name for name in names), names
            model(**small_models.arguments(model)).sum().backward()
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None, name
                assert torch.isfinite(parameter.grad).all(), name
