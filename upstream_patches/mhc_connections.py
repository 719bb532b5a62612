"""Manifold-constrained hyper-connections (mHC) in GPT and hybrid models of 0.19.

What: With `--enable-mhc-connections` a model has `--mhc-num-residual-streams` residual streams,
    which every sub-layer reads and writes through learned weights (arXiv 2512.24880). The options,
    the parameters and their shapes are those of 0.20 (names of the dev branch are accepted, too):
    layers of a hybrid stack are wrapped, layers of a GPT model have two sites, MTP depths read the
    streams, and pipeline stages hand all of them on. The definition is that of
    `cppmega/ops/mhc_reference.py`. What it is not combined with is refused by name when the
    configuration is made.
Why: No release has them: 0.20 is announced with them, for hybrid models and without pipeline
    stages, full recomputation and graphs.
Upstream: https://github.com/NVIDIA/Megatron-LM/pull/4531 (main, not released),
    https://github.com/NVIDIA/Megatron-LM/pull/6401 (main, not released) and
    https://github.com/NVIDIA/Megatron-LM/pull/4949 (dev).
Remove: with 0.20, where it runs what this page does.
Numerics: changes results: with the option, the model is another one. Without it nothing changes
    (bitwise).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cppmega.errors import CppmegaError
from cppmega.modules.mhc_options import other_models, problems
from cppmega.page import Patch, Source

from ._mhc_edits import BLOCK, CONFIG, EDITS, PRESENT


def uses_mhc(args: Any) -> bool:
    """Whether a run's model has hyper-connections."""
    return bool(getattr(args, "enable_mhc_connections", False))


def refuses(args: Any, saved: Mapping[str, tuple[int, ...]]) -> Iterator[CppmegaError]:
    """Name what would be refused when the model is built, and checkpoints of other models."""
    yield from problems(args)
    yield from other_models(args, saved)


PATCH = Patch(
    edits=EDITS,
    reached="forward",
    when=uses_mhc,
    feature=(PRESENT,),
    refuses=refuses,
    after=(
        *("cross_entropy_fusion_linear", "dsa_index_share_checkpoints", "dsa_index_share_holder"),
    ),
)


def fixed_upstream(source: Source) -> bool:
    """Whether the tree has hyper-connections of its own, which are never wrapped twice."""
    return "HyperConnectionModule" in source.text(BLOCK) + source.text(CONFIG)


def verify() -> None:
    import torch

    from cppmega.proof import small_models

    options = {"enable_mhc_connections": True, "mhc_num_residual_streams": 2}
    for make in (small_models.gpt, small_models.hybrid):
        model = make(**options)
        names = {name for name, _ in model.named_parameters()}
        assert any("hyper_connection.mapping_proj.weight" in name for name in names), names
        model(**small_models.arguments(model)).sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert torch.isfinite(parameter.grad).all(), name
