"""Which DSA layers of a launch share keys, read from its arguments before the model is built."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from cppmega.catalogue.megatron_args import layer_pattern
from cppmega.errors import CppmegaError
from cppmega.host import env
from cppmega.modules import dsa_layer_kinds as kinds


def problems(args: Any) -> Iterator[CppmegaError]:
    """Name the first reason for which building the model would be refused."""
    try:
        sources = decided(args)
        for stage in _stages(args):
            kinds.check_stage(sources, stage)
    except CppmegaError as error:
        yield error


def is_asked(args: Any) -> bool:
    """Whether the launch sets the switch of `dsa_index_share`."""
    return env.INDEX_CACHE.read(_variables(args))


def _variables(args: Any) -> Mapping[str, str]:
    """Those that patched code will find in a rank."""
    return cast(Mapping[str, str], getattr(args, "cppmega_variables", os.environ))


def ignored(args: Any) -> Iterator[CppmegaError]:
    """Name a switch or a pattern that no patched code would read."""
    if is_asked(args) and not hasattr(args, "dsa_indexer_topk_freq"):
        yield CppmegaError(
            "dsa-index-share-not-in-release",
            f"{env.INDEX_CACHE.name}=1, and this release of Megatron has no DSA layers that share "
            "keys.",
            "Every DSA layer would choose its own.",
            f"pip install megatron-core==0.19.2, or unset {env.INDEX_CACHE.name}",
        )
    pattern = env.DSA_INDEX_PATTERN.read(_variables(args))
    if pattern and not is_asked(args):
        yield CppmegaError(
            "dsa-index-pattern-ignored",
            f"{env.DSA_INDEX_PATTERN.name}={pattern} is set, and {env.INDEX_CACHE.name} is not.",
            "Every DSA layer would choose its own keys.",
            f"export {env.INDEX_CACHE.name}=1, then python -m cppmega.apply_patches; or unset "
            f"{env.DSA_INDEX_PATTERN.name}",
        )


def decided(args: Any) -> kinds.Sources:
    """The kinds of the decoder's DSA layers.

    Raises:
        CppmegaError: what `dsa_layer_kinds.decide` raises.
    """
    switch = is_asked(args)
    pattern = env.DSA_INDEX_PATTERN.read(_variables(args)) if switch else ""
    frequency, offset = kinds.options_of(args)
    return kinds.decide(pattern, frequency, offset, _layers(args), asked=switch)


def lacking(args: Any, held: Iterable[str]) -> list[str]:
    """The Full layers whose indexer is not among those that a checkpoint has, by name."""
    ends = [layer.rpartition("decoder.")[2] for layer in held]
    full = (number for number, source in decided(args).items() if number == source)
    names = (f"layers.{number - 1}.self_attention" for number in full)
    stacked = "layers.self_attention" in ends and not _shares(args)
    return [] if stacked else [f"decoder.{name}" for name in names if name not in ends]


def _shares(args: Any) -> bool:
    return any(number != source for number, source in decided(args).items())


def _layers(args: Any) -> list[int]:
    if pattern := layer_pattern(args):
        return kinds.dsa_layers(pattern.partition("/")[0].replace("|", ""))
    return list(range(1, args.num_layers + 1))


def _stages(args: Any) -> list[list[int]]:
    """The DSA layers of every stage; none where the stages are not equally long.

    Those are judged when the model is built.
    """
    pattern = layer_pattern(args).partition("/")[0]
    if "|" in pattern:
        return kinds.marked_stages(pattern)
    uneven = (
        *("pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers"),
        *("decoder_last_pipeline_num_layers", "account_for_embedding_in_pipeline_split"),
        "account_for_loss_in_pipeline_split",
    )
    if any(getattr(args, name, None) for name in uneven):
        return []
    stages = getattr(args, "pipeline_model_parallel_size", None) or 1
    stages *= 1 if pattern else getattr(args, "virtual_pipeline_model_parallel_size", None) or 1
    return kinds.even_stages(pattern or kinds.LETTER * args.num_layers, stages)
