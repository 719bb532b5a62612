"""The settings of a configuration, which of them go together, and covers of their pairs."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

MOST_RANKS = 4
DISTRIBUTED = ("distributed", "dp_reshardable")

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
    "optimizer": ("float16", "distributed", "dp_reshardable", "float32", "scaled"),
    "loss": ("unfused", "native", "linear"),
    "position": ("rope", "other"),
    "virtual": (1, 2),
    "uneven": (False, True),
    "experts": ("none", "whole", "EP 2", "ETP 2"),
    "padding_mask": (False, True),
    "tied": (False, True),
    "frozen": (False, True),
    "gradients": ("apart", "fused"),
    "overlap": ("none", "gradients", "both"),
    "clip": (1.0, 0.0),
    "evaluation": (False, True),
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
    reshardable one. Parameters are bf16, but for `float32`, and fp16 for `scaled`, whose loss is
    scaled; its first step overflows and is skipped."""
    loss: str = "unfused"
    position: str = "rope"
    """`other`: learned positions for a GPT, none for a hybrid model."""
    virtual: int = 1
    """Stages of each pipeline rank."""
    uneven: bool = False
    """Pipeline ranks have more or fewer layers than they would have by default."""
    experts: str = "none"
    """In place of MLPs. `whole`: each rank has all of them; `EP 2`, `ETP 2`: two ranks share them
    out, or the weights of each."""
    padding_mask: bool = False
    """The model is told which tokens are padding."""
    tied: bool = False
    """The output layer has the weights of the embedding."""
    frozen: bool = False
    """Attention and an output layer of its own do not learn."""
    gradients: str = "apart"
    """`fused`: linear layers add them to those of earlier micro-batches in their products."""
    overlap: str = "none"
    """`gradients`: reduced during the backward pass; `both`: and parameters gathered during the
    forward pass."""
    clip: float = 1.0
    """The largest gradient norm; 0.0: none."""
    evaluation: bool = False
    """The model is evaluated between two steps."""

    @property
    def ranks(self) -> int:
        """How many processes it needs."""
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def expert(self) -> int:
        """Ranks that share out the experts."""
        return 2 if self.experts == "EP 2" else 1

    @property
    def expert_tensor(self) -> int:
        """Ranks that share out each expert's weights."""
        return 2 if self.experts == "ETP 2" else 1

    @property
    def distributed(self) -> bool:
        """Whether the optimizer is."""
        return self.optimizer in DISTRIBUTED

    @property
    def name(self) -> str:
        """The settings that are not the default, in a line."""
        changed = [f"{k}={v}" for k, v in asdict(self).items() if v != getattr(DEFAULT, k)]
        return " ".join(changed) or "default"


DEFAULT = Configuration()
FOUND = (
    Configuration(pipeline=2, mtp=1, tied=True, gradients="fused", optimizer="float32"),
    Configuration(tied=True, gradients="fused", optimizer="distributed"),
    Configuration(
        model="hybrid",
        tensor=2,
        sequence_parallel=True,
        mtp=1,
        experts="whole",
        padding_mask=True,
    ),
    Configuration(model="hybrid", pipeline=2, virtual=2),
    Configuration(model="hybrid", pipeline=2, virtual=2, optimizer="distributed", clip=0.0),
)
"""Settings in which pages were wrong, run after the cover."""


RULES: tuple[tuple[str, tuple[str, ...], Callable[..., bool]], ...] = (
    *(
        (
            f"there are at most {MOST_RANKS} ranks",
            sizes,
            lambda *sizes: math.prod(sizes) <= MOST_RANKS,
        )
        for sizes in itertools.combinations(("tensor", "context", "pipeline", "data"), 3)
    ),
    (
        "sequence parallelism needs tensor parallelism",
        ("sequence_parallel", "tensor"),
        lambda parallel, tensor: not parallel or tensor > 1,
    ),
    (
        "virtual stages need a pipeline",
        ("virtual", "pipeline"),
        lambda virtual, pipeline: virtual == 1 or pipeline > 1,
    ),
    (
        "an uneven split needs a pipeline",
        ("uneven", "pipeline"),
        lambda uneven, pipeline: not uneven or pipeline > 1,
    ),
    (
        "experts under tensor parallelism need sequence parallelism",
        ("experts", "tensor", "sequence_parallel"),
        lambda experts, tensor, parallel: experts == "none" or tensor == 1 or parallel,
    ),
    (
        "two ranks must be there to share experts",
        ("experts", "tensor", "context", "data"),
        lambda experts, *sizes: experts in ("none", "whole") or math.prod(sizes) > 1,
    ),
    (
        "parameters are gathered in the forward pass by the distributed optimizer",
        ("overlap", "optimizer"),
        lambda overlap, optimizer: overlap != "both" or optimizer in DISTRIBUTED,
    ),
)
"""Why settings do not go together: a reason, the settings that it reads, and what must hold.

Each rule is one that Megatron itself has, or a limit of the machine: what merely fails on stock is
run, and listed.
"""


def illegal(values: Mapping[str, Any]) -> str:
    """Why the given settings do not go together; the others may be missing."""
    for reason, names, holds in RULES:
        if values.keys() >= set(names) and not holds(*(values[name] for name in names)):
            return reason
    return ""


@cache
def legal() -> list[dict[str, Any]]:
    """Every legal choice of the settings that rules read; the other settings are free."""
    ruled = [name for name in AXES if any(name in names for _, names, _ in RULES)]
    every = itertools.product(*(AXES[name] for name in ruled))
    named = (dict(zip(ruled, values, strict=True)) for values in every)
    return [values for values in named if not illegal(values)]


def count() -> int:
    """How many legal configurations there are."""
    free = [values for name, values in AXES.items() if name not in legal()[0]]
    return len(legal()) * math.prod(map(len, free))


def drawn(seed: int) -> Iterator[Configuration]:
    """Legal configurations at random, without end."""
    dice = random.Random(seed)
    while True:
        yield _completed(dice.choice(legal()), dice)


def pairs_of(configuration: Configuration) -> set[Pair]:
    """The pairs of settings that a configuration has."""
    return set(itertools.combinations(vars(configuration).items(), 2))


@cache
def legal_pairs() -> frozenset[Pair]:
    """Every pair that some legal configuration has."""
    names = legal()[0]
    ruled = {
        pair
        for values in legal()
        for number in range(3)
        for pair in itertools.combinations(values.items(), number)
    }
    every = itertools.combinations(((a, value) for a in AXES for value in AXES[a]), 2)
    return frozenset(
        pair
        for pair in every
        if pair[0][0] != pair[1][0] and tuple(item for item in pair if item[0] in names) in ruled
    )


@cache
def cover(seed: int = 2, tries: int = 30) -> tuple[Configuration, ...]:
    """Configurations that have every legal pair between them: greedy, and the same every time.

    Each is the best of some that begin with a pair that is still missing; one of few ranks is
    preferred to one that has a few pairs more.
    """
    dice = random.Random(seed)
    missing = set(legal_pairs())
    chosen: list[Configuration] = []
    while missing:
        begun = dict(min(missing, key=repr))
        fitting = [
            {**values, **begun}
            for values in legal()
            if all(values.get(name, value) == value for name, value in begun.items())
        ]
        drawn = (dice.choice(fitting) for _ in range(tries))
        best = max(
            (_completed(values, dice, missing) for values in drawn),
            key=lambda c: len(pairs_of(c) & missing) / c.ranks**0.3,
        )
        missing -= pairs_of(best)
        chosen.append(best)
    return tuple(chosen)


def first_of_cover(ranks: int) -> list[Configuration]:
    """The part of the cover that adds the most pairs to `FOUND` for this many ranks."""
    seen = set[Pair]().union(*map(pairs_of, FOUND))
    chosen: list[Configuration] = []
    while fitting := [
        c for c in cover() if c not in chosen and c.ranks + sum(d.ranks for d in chosen) <= ranks
    ]:
        chosen.append(max(fitting, key=lambda c: len(pairs_of(c) - seen) / c.ranks))
        seen |= pairs_of(chosen[-1])
    return chosen


def _completed(
    begun: Mapping[str, Any],
    dice: random.Random,
    missing: set[Pair] | frozenset[Pair] = frozenset(),
) -> Configuration:
    """A configuration with these values, and with many of the missing pairs.

    The other settings are taken in a random order, each with the value that adds most of them.
    """
    values = dict(begun)
    rest = [name for name in AXES if name not in begun]
    for name in dice.sample(rest, len(rest)):
        options = dice.sample(AXES[name], len(AXES[name]))
        values[name] = max(options, key=lambda value: _gain(values, name, value, missing))
    return Configuration(**values)


def _gain(
    values: Mapping[str, Any], name: str, value: Any, missing: set[Pair] | frozenset[Pair]
) -> int:
    new = name, value
    return sum(((item, new) in missing) + ((new, item) in missing) for item in values.items())
