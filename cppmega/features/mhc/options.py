"""The options that cannot be combined with manifold-constrained hyper-connections (mHC).

This module does not import torch.

`problems` reads Megatron's arguments before a launch, and a model's configuration when it is built;
either may lack options that the other has.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cppmega.errors import CppmegaError
from cppmega.host.cuda_graphs import cuda_graphs

RECOMPUTED = "mhc"
"""Its name among `recompute_modules`."""

HEAD = "hc_head_fn"
"""The weight of the learned contraction, which earlier forms of mHC lack."""

_INSTEAD = "leave one of the two out"
_ANOTHER_MODEL = (
    "Loaded into this model, it would define a different one, or keys would be missing."
)

_ALONE = {
    "fp32_residual_connection": "the streams have the type of the model",
    "fine_grained_activation_offloading": "the streams are not among what it offloads",
    "cpu_offloading": "the streams are not among what it offloads",
    "overlap_moe_expert_parallel_comm": "its schedule calls the parts of a layer, not the layer",
    "inference_fuse_tp_communication": "it adds a single residual inside its own kernel",
    "heterogeneous_layers_config_path": "layers that lack a sub-layer have not been tested",
    "heterogeneous_block_specs": "layers that lack a sub-layer have not been tested",
    "use_torch_fsdp2": "it shards parameters of one type together, but the mapping's stay fp32",
    "use_megatron_fsdp": "it has not been tested with parameters that stay fp32 in a bf16 model",
    "use_precision_aware_optimizer": "it saves a copy of an fp32 parameter that it never updates",
    "virtual_pipeline_model_parallel_size": "virtual pipeline stages have not been tested",
    "num_layers_per_virtual_pipeline_stage": "virtual pipeline stages have not been tested",
    "num_virtual_stages_per_pipeline_rank": "virtual pipeline stages have not been tested",
    "init_model_with_meta_device": "the mapping is initialized when the module is built",
    "fp8": "it has not been tested with layers in FP8",
    "fp4": "it has not been tested with layers in FP4",
    "mtp_detach_heads": "a depth reads the streams, not the hidden states that it detaches",
}
"""Megatron options that cannot be combined with mHC, and why."""


def problems(options: Any) -> Iterator[CppmegaError]:
    """Yield an error for each option of a run or a model that cannot be combined with mHC.

    Args:
        options: any object; an attribute that it lacks counts as not given.
    """
    if not getattr(options, "enable_mhc_connections", False):
        yield from _without(options)
        return
    for name, why in _ALONE.items():
        if getattr(options, name, None):
            flag = name.replace("_", "-") + ("-format" if name in ("fp8", "fp4") else "")
            yield _refusal(f"--{flag}", f"mHC does not support it: {why}.")
    yield from _sizes(options)
    yield from _layers(options)
    yield from _stages(options)


def _without(options: Any) -> Iterator[CppmegaError]:
    if recomputes(options):
        yield CppmegaError(
            "mhc-not-enabled",
            f"{RECOMPUTED} is to be recomputed, but --enable-mhc-connections is missing.",
            "A model with one residual stream has no module of that name.",
            "--enable-mhc-connections, or another list of --recompute-modules",
        )
    if getattr(options, "use_fused_mhc", False):
        yield CppmegaError(
            "mhc-not-enabled",
            "--use-fused-mhc was given without --enable-mhc-connections.",
            "The kernels would have nothing to compute.",
            "--enable-mhc-connections, or leave --use-fused-mhc out",
        )


def _sizes(options: Any) -> Iterator[CppmegaError]:
    least = {"mhc_num_residual_streams": 1, "mhc_sinkhorn_iterations": 1}
    for name, bound in least.items():
        if getattr(options, name, bound) < bound:
            yield _invalid(name, f"below {bound}")
    if getattr(options, "mhc_init_gating_factor", 0.0) < 0:
        yield _invalid("mhc_init_gating_factor", "negative")
    layers = getattr(options, "mhc_recompute_layer_num", None)
    if layers is not None and layers < 1:
        yield _invalid("mhc_recompute_layer_num", "below 1")


def _layers(options: Any) -> Iterator[CppmegaError]:
    if getattr(options, "hidden_dropout", 0.0) > 0:
        yield _refusal(
            "--hidden-dropout", "Dropout between a sub-layer and the streams is not defined here."
        )
    if cuda_graphs(options) != "none":
        yield _refusal(
            "--cuda-graph-impl", "The graphs of a layer take one stream, and a site has several."
        )
    if getattr(options, "context_parallel_size", 1) > 1:
        yield _refusal(
            "--context-parallel-size", "Sequences split over ranks have not been tested."
        )
    if recomputes(options) and "mlp" in _recomputed(options):
        yield _refusal(
            "--recompute-modules mlp", "Both would recompute the input of the sub-layer."
        )


def _stages(options: Any) -> Iterator[CppmegaError]:
    if not getattr(options, "mtp_num_layers", None):
        return
    if getattr(options, "tp_comm_overlap", False):
        yield _refusal(
            "--tp-comm-overlap", "Its buffers have no name for the two projections of an MTP depth."
        )
    if getattr(options, "pipeline_model_parallel_layout", None):
        yield _refusal(
            "--pipeline-model-parallel-layout",
            "An MTP depth needs the streams of the decoder's last layer in its own stage.",
        )


def _recomputed(options: Any) -> Sequence[str]:
    selective = getattr(options, "recompute_granularity", None) == "selective"
    return (getattr(options, "recompute_modules", None) or ()) if selective else ()


def other_models(options: Any, saved: Mapping[str, tuple[int, ...]]) -> Iterator[CppmegaError]:
    """Yield the reasons why a run cannot resume from a checkpoint with other residual streams.

    Args:
        options: the run's arguments.
        saved: names and shapes of the checkpoint's tensors; empty: the run does not resume.
    """
    has = any("hyper_connection" in name for name in saved)
    head = next((shape for name, shape in saved.items() if name.endswith(HEAD)), None)
    streams = getattr(options, "mhc_num_residual_streams", None)
    asked = bool(getattr(options, "enable_mhc_connections", False))
    if has and not asked:
        yield CppmegaError(
            "mhc-checkpoint-has-streams",
            "The checkpoint is that of a model with hyper-connections.",
            _ANOTHER_MODEL,
            "resume with --enable-mhc-connections, or from another checkpoint",
        )
    elif saved and asked and not has:
        yield CppmegaError(
            "mhc-checkpoint-one-stream",
            "The checkpoint is that of a model with one residual stream.",
            _ANOTHER_MODEL,
            "resume without --enable-mhc-connections, or from another checkpoint",
        )
    elif has and head is None:
        yield CppmegaError(
            "mhc-checkpoint-other-form",
            "The checkpoint is that of a model whose streams end in their mean (main of August "
            "2026, or dev before June).",
            "It mixes streams by another matrix: loaded here, it would define another model.",
            "resume with the Megatron that saved it, or from another checkpoint",
        )
    elif head is not None and streams not in (None, head[0]):
        yield CppmegaError(
            "mhc-checkpoint-streams",
            f"The checkpoint is that of a model with {head[0]} streams, not {streams}.",
            _ANOTHER_MODEL,
            f"--mhc-num-residual-streams {head[0]}, or another checkpoint",
        )


def _refusal(what: str, why: str) -> CppmegaError:
    return CppmegaError(
        "mhc-unsupported",
        f"{what} cannot be combined with --enable-mhc-connections.",
        why,
        _INSTEAD,
    )


def _invalid(name: str, how: str) -> CppmegaError:
    option = f"--{name.replace('_', '-')}"
    return CppmegaError(
        "mhc-option-invalid",
        f"{option} is {how}.",
        "Such hyper-connections are not defined.",
        f"another value of {option}",
    )


def recomputes(options: Any) -> bool:
    """Whether streams are recomputed in the backward pass."""
    return RECOMPUTED in _recomputed(options)


def check(config: Any) -> None:
    """Raise the first of `problems` of a configuration."""
    for problem in problems(config):
        raise problem


def width(config: Any) -> int:
    """The width of the tensors that pipeline stages exchange: of all streams or the only one."""
    streams = 1
    if getattr(config, "enable_mhc_connections", False):
        streams = config.mhc_num_residual_streams
    hidden: int = config.hidden_size
    return hidden * streams


class OneValue(argparse.Action):
    """An option with two spellings, which may be repeated only with the same value."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Store the value, and refuse a different one."""
        given = f"_given_{self.dest}"
        if getattr(self, given, values) != values:
            spellings = " and ".join(self.option_strings)
            parser.error(f"{spellings} are one option, but were given two values")
        setattr(self, given, values)
        setattr(namespace, self.dest, values)
