"""Rules of DSA layers that share keys, by Megatron's options or by a pattern of F and S."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from cppmega.errors import CppmegaError
from cppmega.host import env
from cppmega.rules.rule import Rule, Run
from cppmega.sizes import dsa_layers as kinds
from cppmega.sizes.megatron_args import uses_dsa, variables

_PART = "DSA layers that share keys"
_WEIGHT = re.compile(r"(.*)\.core_attention\.indexer\.")
_STACKED = re.compile(r"(.*\.layers)\.(?!\d)")
"""A tensor that stacks one weight of all layers, as homogeneous models are saved."""


def sources(args: Any) -> kinds.Sources:
    """The decoder's DSA layers, each with the layer whose keys it uses.

    Raises:
        CppmegaError: what `dsa_layers.decide` raises.
    """
    asked = _is_asked(args)
    pattern = env.DSA_INDEX_PATTERN.read(variables(args)) if asked else ""
    frequency, offset = kinds.options_of(args)
    return kinds.decide(pattern, frequency, offset, kinds.layers_of(args), asked=asked)


def indexed_layers(names: Iterable[str]) -> list[str]:
    """The attentions that have an indexer, in order; optimizer entries are ignored."""
    weights = (None if name.startswith("optimizer.") else _WEIGHT.match(name) for name in names)
    return list(dict.fromkeys(weight[1] for weight in weights if weight is not None))


def not_saved(layers: Sequence[str], held: Iterable[str]) -> CppmegaError:
    """The error for indexers that a checkpoint lacks.

    Args:
        layers: the attentions whose indexer is missing.
        held: those whose indexer the checkpoint has.
    """
    return _NOT_SAVED.error(_missing(layers, held))


def _missing(layers: Sequence[str], held: Iterable[str]) -> dict[str, str]:
    stacked = any(_STACKED.match(f"{layer}.") for layer in held)
    form = " It holds those of all layers in one tensor each." if stacked else ""
    return {"missing": ", ".join(layers), "form": form} if layers else {}


def _is_asked(args: Any) -> bool:
    return env.INDEX_CACHE.read(variables(args))


def _check(run: Run) -> bool:
    """Read the kinds of the layers; whatever they contradict is raised."""
    if uses_dsa(run):
        layers = sources(run)
        for stage in kinds.stages_of(run):
            kinds.check_stage(layers, stage)
    return False


def _ignored(run: Run) -> object:
    pattern = env.DSA_INDEX_PATTERN.read(run.cppmega_variables)
    return uses_dsa(run) and pattern and not _is_asked(run) and {"pattern": pattern}


def _lacking(run: Run) -> dict[str, str]:
    """The Full layers whose indexer is not in the checkpoint that the run resumes from."""
    held = indexed_layers(run.saved) if uses_dsa(run) else []
    if not held:
        return {}
    ends = [layer.rpartition("decoder.")[2] for layer in held]
    layers = sources(run)
    full = [number for number, source in layers.items() if number == source]
    if "layers.self_attention" in ends and len(full) == len(layers):
        return {}  # one tensor stacks the weights of all layers
    names = (f"layers.{number - 1}.self_attention" for number in full)
    return _missing([f"decoder.{name}" for name in names if name not in ends], held)


_NOT_SAVED = Rule(
    _lacking,
    "The checkpoint has no weights for the indexers of {missing}.{form}",
    "These layers would choose keys at random: it was saved by a model in which they share keys, "
    "or in another layout.",
    f"train with the sharing that it was saved with ({env.INDEX_CACHE.name}=1 "
    f"{env.DSA_INDEX_PATTERN.name}=..., or --dsa-indexer-topk-freq)",
    "dsa-indexer-not-saved",
    _PART,
)
RULES: tuple[Rule, ...] = (
    Rule(_check, concerns=_PART),
    Rule(
        _ignored,
        f"{env.DSA_INDEX_PATTERN.name}={{pattern}} is set, and {env.INDEX_CACHE.name} is not.",
        "Every DSA layer would select its own keys.",
        f"export {env.INDEX_CACHE.name}=1, then python -m cppmega.apply_patches; or unset "
        f"{env.DSA_INDEX_PATTERN.name}",
        "dsa-index-sharing",
        _PART,
    ),
    _NOT_SAVED,
)
