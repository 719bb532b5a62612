"""The settings of a configuration, which of them go together, and covers of their pairs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

MOST_RANKS = 4

AXES: dict[str, tuple[Any, ...]] = {
    "model": ("gpt", "hybrid"),
    "tensor": (1, 2),
    "sequence_parallel": (False, True),
    "context": (1, 2),
    "pipeline": (1, 2),
    "data": (1, 2),
    "packing": ("none", "packed", "no total", "padded"),
    "mtp": (0, 1, 2),
    "recompute": ("none", "selective", "uniform", "block"),
    "optimizer": ("float16", "distributed", "dp_reshardable", "float32"),
    "loss": ("unfused", "native", "linear"),
    "position": ("rope", "other"),
}
"""Every setting and its values."""

Pair = tuple[tuple[str, Any], tuple[str, Any]]
"""Two settings with a value each, in the order of `AXES`."""


@dataclass(frozen=True)
class Configuration:
    """One value of every setting."""

    model: str = "gpt"
    tensor: int = 1
    sequence_parallel: bool = False
    context: int = 1
    pipeline: int = 1
    data: int = 1
    packing: str = "none"
    """`no total`: packed without `total_tokens`; `padded`: documents end with padding."""
    mtp: int = 0
    recompute: str = "none"
    optimizer: str = "float16"
    """`dp_reshardable`: the distributed one, with that format of checkpoint and not the fully
    reshardable one. Parameters are bf16, but for `float32`."""
    loss: str = "unfused"
    position: str = "rope"
    """`other`: learned positions for a GPT, none for a hybrid model."""
    # In no cover:
    expert: int = 1
    """Ranks that share the experts, of models that have any."""
    tied: bool = False
    """The output layer has the weights of the embedding."""
    gradients: str = "apart"
    """`fused`: linear layers add them to those of earlier micro-batches in their products."""
    virtual: int = 1
    """Stages of each pipeline rank."""
    clip: float = 1.0
    """The largest gradient norm; 0.0: none."""

    @property
    def ranks(self) -> int:
        """How many processes it needs."""
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def name(self) -> str:
        """The settings that are not the default, in a line."""
        changed = [f"{k}={v}" for k, v in asdict(self).items() if v != getattr(DEFAULT, k)]
        return " ".join(changed) or "default"


DEFAULT = Configuration()
FOUND = (
    Configuration(pipeline=2, mtp=1, tied=True, gradients="fused", optimizer="float32"),
    Configuration(tied=True, gradients="fused", optimizer="distributed"),
    Configuration(model="hybrid", pipeline=2, virtual=2),
    Configuration(model="hybrid", pipeline=2, virtual=2, optimizer="distributed", clip=0.0),
)
"""Settings outside the cover in which pages were wrong."""


def illegal(values: Mapping[str, Any]) -> str:
    """Why the given settings do not go together; the others may be missing.

    Each rule is one that Megatron itself has, or a limit of the machine: what merely fails on
    stock is run, and listed.
    """
    ranks = 1
    for name in ("tensor", "context", "pipeline", "data"):
        ranks *= values.get(name, 1)
    if ranks > MOST_RANKS:
        return f"{ranks} ranks are more than {MOST_RANKS}"
    if values.get("sequence_parallel") and values.get("tensor") == 1:
        return "sequence parallelism needs tensor parallelism"
    return ""


def every() -> Iterator[Configuration]:
    """Every legal configuration, in the order of `AXES`."""
    for values in itertools.product(*AXES.values()):
        named = dict(zip(AXES, values, strict=True))
        if not illegal(named):
            yield Configuration(**named)


def pairs_of(configuration: Configuration) -> set[Pair]:
    """The pairs of settings that a configuration has."""
    return set(itertools.combinations(vars(configuration).items(), 2))


@cache
def legal_pairs() -> frozenset[Pair]:
    """Every pair that some legal configuration has."""
    return frozenset(
        (first, second)
        for a, b in itertools.combinations(AXES, 2)
        for first in ((a, value) for value in AXES[a])
        for second in ((b, value) for value in AXES[b])
        if _completed(dict((first, second)), random.Random(0)) is not None
    )


def cover(seed: int = 2, tries: int = 30) -> list[Configuration]:
    """Configurations that have every legal pair between them: greedy, and the same every time.

    Each is the best of some that begin with a pair that is still missing; one of few ranks is
    preferred to one that has a few pairs more.
    """
    dice = random.Random(seed)
    missing = set(legal_pairs())
    chosen: list[Configuration] = []
    while missing:
        begun = dict(min(missing, key=repr))
        drawn = [_completed(begun, dice, missing) for _ in range(tries)]
        best = max((c for c in drawn if c), key=lambda c: len(pairs_of(c) & missing) / c.ranks**0.3)
        missing -= pairs_of(best)
        chosen.append(best)
    return chosen


def _completed(
    begun: Mapping[str, Any],
    dice: random.Random,
    missing: set[Pair] | frozenset[Pair] = frozenset(),
) -> Configuration | None:
    """A legal configuration with these values, and with many of the missing pairs; None: none.

    The settings are taken in a random order, each with the value that adds most missing pairs and
    leaves something legal.
    """
    if illegal(begun):
        return None
    rest = [name for name in AXES if name not in begun]
    if not rest:
        return Configuration(**begun)
    name = dice.choice(rest)
    options = dice.sample(AXES[name], len(AXES[name]))
    options.sort(key=lambda value: -_gain(begun, name, value, missing))
    tried = (_completed({**begun, name: value}, dice, missing) for value in options)
    return next((found for found in tried if found), None)


def _gain(
    values: Mapping[str, Any], name: str, value: Any, missing: set[Pair] | frozenset[Pair]
) -> int:
    order = list(AXES)
    pairs = (
        tuple(sorted(((name, value), item), key=lambda i: order.index(i[0])))
        for item in values.items()
    )
    return sum(pair in missing for pair in pairs)
