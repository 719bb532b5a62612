"""Read from a launch's arguments which DSA layers share keys, before the model is built."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any

from cppmega.catalogue.megatron_args import (
    captures,
    cuda_graphs,
    has_experts,
    layer_pattern,
    variables,
)
from cppmega.errors import CppmegaError
from cppmega.features.dsa import layer_kinds as kinds
from cppmega.host import env
from cppmega.host.cuda_graphs import graph_parts


def problems(args: Any) -> Iterator[CppmegaError]:
    """Yield the first reason why building the model would be refused."""
    try:
        sources = decided(args)
        for stage in _stages(args):
            kinds.check_stage(sources, stage)
    except CppmegaError as error:
        yield error


def is_asked(args: Any) -> bool:
    """Whether the launch sets the switch of `dsa_index_share`."""
    return env.INDEX_CACHE.read(variables(args))


def ignored(args: Any) -> Iterator[CppmegaError]:
    """Yield an error if a pattern is set that no patched code would read."""
    pattern = env.DSA_INDEX_PATTERN.read(variables(args))
    if pattern and not is_asked(args):
        yield CppmegaError(
            "dsa-index-pattern-ignored",
            f"{env.DSA_INDEX_PATTERN.name}={pattern} is set, and {env.INDEX_CACHE.name} is not.",
            "Every DSA layer would select its own keys.",
            f"export {env.INDEX_CACHE.name}=1, then python -m cppmega.apply_patches; or unset "
            f"{env.DSA_INDEX_PATTERN.name}",
        )


def outside_stacks(args: Any, refused_graphs: Container[str]) -> Iterator[CppmegaError]:
    """Reject options that run the layers of a stack without calling it, if layers share keys.

    Args:
        args: of the launch.
        refused_graphs: the values of `--cuda-graph-impl` with which layers that are captured one by
            one would not find the keys of other layers.
    """
    switch = f"unset {env.INDEX_CACHE.name}"
    alone = switch if is_asked(args) else "--dsa-indexer-topk-freq 1"
    if cuda_graphs(args) in refused_graphs and captures(args, "attn"):
        yield CppmegaError(
            "dsa-index-share-in-graphs",
            "DSA layers that share keys do not support CUDA graphs of single attention layers "
            f"({cuda_graphs(args)}).",
            "They are captured without their stack, through which a Shared layer finds the keys of "
            "its Full layer.",
            f"train without CUDA graphs, or {_option_of_parts(args)} without attn, or {alone}",
        )
    elif _captures_some_layers(args):
        yield CppmegaError(
            "dsa-index-share-in-graphs-of-some-layers",
            "DSA layers share keys, and Megatron's local CUDA graphs of "
            f"{', '.join(sorted(graph_parts(args)))} capture the attention of only some of them: "
            "dense layers and MoE layers are captured differently.",
            "A replayed layer cannot pass its keys to one that is not captured, nor take them "
            "from it.",
            f"--cuda-graph-impl transformer_engine, or train without CUDA graphs, or {alone}",
        )
    if getattr(args, "overlap_moe_expert_parallel_comm", False):
        yield CppmegaError(
            "dsa-index-share-in-combined-schedule",
            "DSA layers that share keys do not support the schedule of "
            "--overlap-moe-expert-parallel-comm, which interleaves the layers of two microbatches.",
            "A layer could not tell which microbatch's keys are its own.",
            f"leave out --overlap-moe-expert-parallel-comm, or {alone}",
        )


def _captures_some_layers(args: Any) -> bool:
    """Whether local CUDA graphs hold either the dense layers of a GPT model or its MoE layers.

    Given `attn` or `mlp`, they hold dense layers as a whole, and given `moe`, MoE layers; of other
    MoE layers, they hold the router without the attention. Transformer Engine's hold the attention
    of all layers.
    """
    if cuda_graphs(args) != "local" or layer_pattern(args) or not has_experts(args):
        return False
    frequency = getattr(args, "moe_layer_freq", 1)
    both = len(set(frequency)) > 1 if isinstance(frequency, list) else frequency > 1
    parts = graph_parts(args)
    return both and ("moe" in parts) != bool(parts & {"attn", "mlp"})


def _option_of_parts(args: Any) -> str:
    has = hasattr(args, "cuda_graph_modules")
    return "--cuda-graph-modules" if has else "--cuda-graph-scope"  # until 0.17


def decided(args: Any) -> kinds.Sources:
    """The kinds of the decoder's DSA layers.

    Raises:
        CppmegaError: what `dsa_layer_kinds.decide` raises.
    """
    switch = is_asked(args)
    pattern = env.DSA_INDEX_PATTERN.read(variables(args)) if switch else ""
    frequency, offset = kinds.options_of(args)
    return kinds.decide(pattern, frequency, offset, _layers(args), asked=switch)


def lacking(args: Any, held: Iterable[str]) -> list[str]:
    """The names of the Full layers whose indexer is not in a checkpoint."""
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
    """The DSA layers of every stage; none if the stages differ in length.

    Such stages are checked when the model is built.
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
