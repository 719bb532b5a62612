"""Which DSA layers choose keys (Full), and whose keys the other layers use (Shared).

A pattern has one letter for each of the decoder's DSA layers, in order: `FSSFSSFSS`. Megatron 0.19
specifies the kinds by layer number, with `--dsa-indexer-topk-freq` and
`--dsa-indexer-skip-topk-offset`. Either becomes a mapping from the number of each DSA layer to that
of the Full layer whose keys it uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from cppmega.errors import CppmegaError
from cppmega.host import env
from cppmega.sizes.megatron_args import layer_pattern

Sources = dict[int, int]
"""Number of a DSA layer -> number of the Full layer whose keys it uses; its own if it is Full."""

_UNEVEN = (
    *("pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers"),
    *("decoder_last_pipeline_num_layers", "account_for_embedding_in_pipeline_split"),
    "account_for_loss_in_pipeline_split",
)
"""Arguments that make stages differ in length."""

LETTER = "D"
"""A DSA layer in the pattern of a hybrid model."""


def dsa_layers(letters: Iterable[str], before: int = 0) -> list[int]:
    """The numbers, from 1, of the DSA layers of a hybrid pattern.

    Args:
        letters: one per layer, without the separators of pipeline stages.
        before: the number of layers in earlier stages.
    """
    return [number for number, letter in enumerate(letters, before + 1) if letter == LETTER]


def even_stages(letters: Sequence[str], stages: int) -> list[list[int]]:
    """The DSA layers of each stage of a pipeline whose stages have equal numbers of layers.

    Args:
        letters: one per layer.
        stages: the number of stages, including virtual ones.
    """
    width = -(-len(letters) // stages)
    starts = range(0, len(letters), width)
    return [dsa_layers(letters[start : start + width], start) for start in starts]


def marked_stages(pattern: str) -> list[list[int]]:
    """The DSA layers of each stage of a hybrid pattern in which `|` begins a stage."""
    before, stages = 0, []
    for letters in pattern.split("|"):
        stages.append(dsa_layers(letters, before))
        before += len(letters)
    return stages


def from_pattern(pattern: str, layers: Sequence[int]) -> Sources:
    """Read a pattern of F and S.

    Args:
        pattern: one letter per DSA layer of the decoder, in model order.
        layers: the numbers of these layers.

    Raises:
        CppmegaError: `dsa-index-sharing`.
    """
    if wrong := _problem(pattern, len(layers)):
        raise CppmegaError(
            "dsa-index-sharing",
            f"DSA index pattern {pattern!r}: {wrong}.",
            "It has one letter per DSA layer of the decoder: F chooses keys, S uses those of the "
            "last F before it.",
            f"{env.DSA_INDEX_PATTERN.name}={_example(len(layers))}, for example",
        )
    sources, full = {}, 0
    for letter, number in zip(pattern, layers, strict=True):
        full = number if letter == "F" else full
        sources[number] = full
    return sources


def _problem(pattern: str, layers: int) -> str:
    if others := sorted(set(pattern) - set("FS")):
        return f"{', '.join(map(repr, others))} is neither F nor S"
    if len(pattern) != layers:
        return f"it has {len(pattern)} letters for {layers} DSA layers"
    return "it begins with S, which has no layer before it" if pattern.startswith("S") else ""


def _example(layers: int) -> str:
    return ("FSS" * layers)[:layers]


def from_options(frequency: int, offset: int, layers: Sequence[int]) -> Sources:
    """Read Megatron's options: layer `offset` and every `frequency`-th one after it are Full.

    So are the layers before `offset`. A source may turn out not to be a DSA layer, which
    `check_stage` refuses.
    """
    first = max(offset, 1)
    return {number: number - max(number - first, 0) % frequency for number in layers}


def indexers_of(options: Any, decoder: Sequence[int], depths: Sequence[int]) -> int:
    """The number of DSA layers that have an indexer.

    Args:
        options: Megatron's arguments, or its configuration.
        decoder: the numbers of the decoder's DSA layers.
        depths: those of all MTP depths, which share keys only by Megatron's options.
    """
    frequency, offset = options_of(options)
    if env.INDEX_CACHE.read() and (pattern := env.DSA_INDEX_PATTERN.read()):
        return _count_full(from_pattern(pattern, decoder)) + len(depths)
    alone = (_count_full(from_options(frequency, offset, [number])) for number in depths)
    return _count_full(from_options(frequency, offset, decoder)) + sum(alone)


def _count_full(sources: Sources) -> int:
    return sum(number == source for number, source in sources.items())


def options_of(options: Any) -> tuple[int, int]:
    """Megatron's frequency and offset; 1 and 0 in a release without these options."""
    frequency = getattr(options, "dsa_indexer_topk_freq", None) or 1
    return frequency, getattr(options, "dsa_indexer_skip_topk_offset", None) or 0


def decide(
    pattern: str, frequency: int, offset: int, layers: Sequence[int], asked: bool = False
) -> Sources:
    """The kinds of a decoder's DSA layers, from the pattern or from the options.

    Args:
        pattern: of F and S; "" if the options decide.
        frequency: Megatron's option; 1 if the pattern decides.
        offset: Megatron's option.
        layers: the numbers of the decoder's DSA layers.
        asked: whether layers must share keys, so that one of the two must be given.

    Raises:
        CppmegaError: `dsa-index-sharing`.
    """
    if not pattern:
        if frequency <= 1 and asked:
            raise _unset(len(layers))
        return from_options(frequency, offset, layers)
    sources = from_pattern(pattern, layers)
    if frequency > 1 and sources != (other := from_options(frequency, offset, layers)):
        raise CppmegaError(
            "dsa-index-sharing",
            f"DSA index pattern {pattern} makes the layers {_full(sources)} Full; "
            f"--dsa-indexer-topk-freq {frequency} --dsa-indexer-skip-topk-offset {offset} makes it "
            f"{_full(other)}.",
            "Only one of the two can be meant.",
            f"leave the two options out, or unset {env.DSA_INDEX_PATTERN.name}",
        )
    return sources


def _full(sources: Sources) -> str:
    return ", ".join(str(number) for number, source in sources.items() if number == source)


def _unset(layers: int) -> CppmegaError:
    return CppmegaError(
        "dsa-index-sharing",
        f"{env.INDEX_CACHE.name}=1, but nothing specifies which DSA layers share keys.",
        "Every layer would choose its own keys, as if it were unset.",
        f"export {env.DSA_INDEX_PATTERN.name}={_example(layers)} (one letter per DSA layer), "
        "or --dsa-indexer-topk-freq and --dsa-indexer-skip-topk-offset (Megatron 0.19 and later), "
        f"or unset {env.INDEX_CACHE.name}",
    )


def layers_of(args: Any) -> list[int]:
    """The numbers of the decoder's DSA layers, by Megatron's arguments."""
    if pattern := layer_pattern(args):
        return dsa_layers(pattern.partition("/")[0].replace("|", ""))
    return list(range(1, args.num_layers + 1))


def stages_of(args: Any) -> list[list[int]]:
    """The DSA layers of every pipeline stage, by Megatron's arguments.

    There are none if the stages differ in length; such stages are checked when the model is built.
    """
    pattern = layer_pattern(args).partition("/")[0]
    if "|" in pattern:
        return marked_stages(pattern)
    if any(getattr(args, name, None) for name in _UNEVEN):
        return []
    stages = getattr(args, "pipeline_model_parallel_size", None) or 1
    stages *= 1 if pattern else getattr(args, "virtual_pipeline_model_parallel_size", None) or 1
    return even_stages(pattern or LETTER * args.num_layers, stages)


def check_stage(sources: Sources, stage: Sequence[int]) -> None:
    """Refuse a pipeline stage (also a virtual one) with Shared layers but not their Full layer.

    Args:
        sources: those of all DSA layers of the decoder.
        stage: the numbers of the DSA layers of one stage, in order.

    Raises:
        CppmegaError: `dsa-index-sharing`.
    """
    alone = [number for number in stage if sources[number] not in stage]
    if not alone:
        return
    needed = ", ".join(dict.fromkeys(str(sources[number]) for number in alone))
    nowhere = {sources[number] for number in alone} - set(sources)
    where = "which is not a DSA layer" if nowhere else "which another pipeline stage has"
    raise CppmegaError(
        "dsa-index-sharing",
        f"The DSA layers {', '.join(map(str, alone))} are Shared and use the keys of layer "
        f"{needed}, {where}. DSA layers of this stage: {', '.join(map(str, stage))}.",
        "Chosen keys do not cross pipeline stages.",
        f"make layer {alone[0]} Full ({env.DSA_INDEX_PATTERN.name}: F for DSA layer "
        f"{list(sources).index(alone[0]) + 1} of {len(sources)}), or split the pipeline so that "
        "every stage begins with a Full layer",
    )
