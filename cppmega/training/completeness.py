"""No part of the model is missing: it has the parameters of the recipe, and all of them train.

A part can be lost without an error: an argument after the recipe's replaces one of them, a patch
leaves experts out of the routing, a loss does not reach an MTP depth. The run is as fast as before,
or faster. So the parameters that were built are counted before the first step, and each must have
had a gradient within the first steps of every start. An expert that no token was sent to has none:
where that is less than half of a layer's experts, it is the routers' choice, and is only printed.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cppmega.errors import CppmegaError
from cppmega.host.wording import listed
from cppmega.recipe import Recipe
from cppmega.recipe.arithmetic import parameters
from cppmega.training.nonfinite import gradient, short_name

STEPS = 10
"""Steps of a start within which every parameter must have a gradient. Factors that are zero at
first have none in the first step."""
_KINDS = ".structure.kinds"
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(?:local_experts\.(\d+)\.|linear_fc\d\.[a-z_]+(\d+)$)")
"""The layer and the number of an expert, in the name of its parameter; those of a layer's experts
together (`experts.weight1`) are not an expert's."""

Place = tuple[int, int, int]
"""Pipeline, tensor and expert rank."""


@dataclass(frozen=True, slots=True)
class Built:
    """The parameters of one rank, by part of the model."""

    place: Place
    replicated: Mapping[str, int]
    distributed: Mapping[str, int]
    """The parameters of experts, where expert parallelism distributes them."""


@dataclass(slots=True)
class Completeness:
    """The checks of one start on this rank."""

    recipe: Recipe
    _steps: int = 0
    _unseen: dict[str, Any] = field(default_factory=dict)

    def before_step(self, models: Iterable[Any]) -> None:
        """Count the parameters before the first step.

        Raises:
            CppmegaError: `model-differs-from-recipe`; on every rank.
        """
        if self._steps:
            return
        named = [pair for model in models for pair in model.named_parameters()]
        self._unseen = {short_name(name): p for name, p in named if _trains(name, p, self.recipe)}
        check_built(self.recipe, _gathered(_built(named, _place())))

    def after_step(self) -> None:
        """Look for gradients of the parameters that had none so far.

        Raises:
            CppmegaError: `part-without-gradient`; on every rank.
        """
        self._steps += 1
        if self._steps > STEPS:
            return
        self._unseen = dict(_without_gradient(self._unseen))
        if self._steps == STEPS:
            ranks = _gathered((_place(), self._unseen_keys()))
            idle = refuse_unseen(ranks, self.recipe.num_experts or 0)
            if idle:
                from megatron.training.utils import print_rank_0

                print_rank_0(
                    f"No token was sent to some experts in the first {STEPS} steps: {_named(idle)}."
                )

    def _unseen_keys(self) -> list[tuple[str, bool]]:
        return [(name, _is_distributed(p)) for name, p in self._unseen.items()]


def check_built(recipe: Recipe, ranks: Sequence[Built]) -> None:
    """Compare the parameters of all ranks with the recipe's.

    Under tensor parallelism nothing is compared: which parameters are split is not the same in
    every layer.

    Raises:
        CppmegaError: `model-differs-from-recipe`.
    """
    if recipe.tensor_model_parallel_size > 1:
        return
    built: Counter[str] = Counter()
    for one in {rank.place[0]: rank for rank in ranks}.values():
        # Later stages hold copies of the embedding, for MTP depths and tied heads.
        first = one.place[0] == 0
        kept = {part: n for part, n in one.replicated.items() if first or part not in _EMBEDDINGS}
        built.update(kept)
    for one in {(rank.place[0], rank.place[2]): rank for rank in ranks}.values():
        built.update(one.distributed)
    wanted = _counted(recipe)
    wrong = [
        f"{part}: {built[part]} built, {count} in the recipe"
        for part, count in wanted.items()
        if built[part] != count and not (part == "head" and recipe.tied_embeddings)
    ]
    if wrong:
        raise CppmegaError(
            "model-differs-from-recipe",
            f"The model has other parameters than recipe {recipe.name}: {'; '.join(wrong)}.",
            "A part is missing, or has another size: the run would be recorded as what it is not.",
            "leave out the Megatron arguments after --, or --set the recipe's fields instead; "
            "cppmega status shows whether every patch is applied",
        )


_EMBEDDINGS = ("embedding", "input embeddings")


def _counted(recipe: Recipe) -> dict[str, int]:
    count = parameters(recipe)
    further = sum(n for part, n in count.extras.items() if part in ("ngram_hash", "structure"))
    return {
        "embedding": count.embedding,
        "input embeddings": further,
        "trunk": count.trunk - count.embedding - count.head - further,
        "MTP": count.mtp,
        "head": count.head,
        "experts": count.experts,
    }


def _part(name: str) -> str:
    if name.startswith("embedding."):
        return "input embeddings" if ".input_embeddings." in name else "embedding"
    if name.startswith("output_layer."):
        return "head"
    return "MTP" if name.startswith("mtp.") else "trunk"


def _built(named: Iterable[tuple[str, Any]], place: Place) -> Built:
    counts: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    for name, parameter in named:
        own = counts[_is_distributed(parameter)]
        own[_part(short_name(name))] += parameter.numel()
        if ".mlp.experts." in name:  # parts of trunk and MTP, too
            own["experts"] += parameter.numel()
    return Built(place, *map(dict, counts))


def _is_distributed(parameter: Any) -> bool:
    """Whether expert parallelism distributes it: Megatron reduces its gradient separately."""
    return not getattr(parameter, "allreduce", True)


def _trains(name: str, parameter: Any, recipe: Recipe) -> bool:
    """Whether a parameter must have a gradient: indexers have none without their loss."""
    learns = recipe.dsa_indexer_loss_coeff or ".indexer." not in name
    return bool(parameter.requires_grad and learns)


def _without_gradient(parameters_: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Those whose gradient is zero throughout, or missing; reads the device once."""
    import torch

    gradients = {name: gradient(p) for name, p in parameters_.items()}
    there = {name: g for name, g in gradients.items() if g is not None}
    used = [_is_used(name, g) for name, g in there.items()]
    flags = torch.stack(used).tolist() if used else []
    seen = {name for name, flag in zip(there, flags, strict=True) if flag}
    yield from ((name, p) for name, p in parameters_.items() if name not in seen)


def _is_used(name: str, gradient_: Any) -> Any:
    """Whether a gradient counts: in the table of kinds, more than one row must have one.

    In a batch without structure, every token would have the same kind.
    """
    if name.endswith(_KINDS):
        return gradient_.view(-1, gradient_.shape[-1]).any(dim=1).sum() > 1
    return gradient_.any()


Lost = tuple[tuple[int, ...], str]
"""Where a parameter without a gradient is, and its name."""


def _lost(ranks: Sequence[tuple[Place, list[tuple[str, bool]]]]) -> list[Lost]:
    """The parameters that had no gradient on any rank that has them.

    Replicas see different tokens, and an optimizer that is sharded sums each gradient on one rank.
    """
    holders: Counter[tuple[int, ...]] = Counter()
    for (stage, tensor, expert), _ in ranks:
        holders.update([(stage, tensor), (stage, tensor, expert)])
    unseen: Counter[Lost] = Counter()
    for (stage, tensor, expert), names in ranks:
        for name, is_expert in names:
            place = (stage, tensor, expert) if is_expert else (stage, tensor)
            unseen[place, name] += 1
    return [(place, name) for (place, name), n in unseen.items() if n == holders[place]]


def _of_idle_experts(lost: Iterable[Lost], experts: int) -> set[Lost]:
    """Those of experts in layers that used more than half of theirs."""
    by_layer: defaultdict[tuple[int, str], dict[Lost, tuple[Any, ...]]] = defaultdict(dict)
    for place, name in lost:
        if (found := _EXPERT.match(name)) is not None:
            by_layer[place[0], found[1]][place, name] = (place[2:], found[2] or found[3])
    few = (one for one in by_layer.values() if 2 * len(set(one.values())) < experts)
    return {each for one in few for each in one}


def _named(lost: Iterable[Lost]) -> str:
    return listed([f"{name} (stage {place[0]}{_of_expert(place)})" for place, name in lost])


def refuse_unseen(
    ranks: Sequence[tuple[Place, list[tuple[str, bool]]]], experts: int
) -> list[Lost]:
    """Refuse parameters without a gradient, but for those of idle experts, which are returned.

    Args:
        ranks: of each rank, its place, and the names of the parameters without a gradient and
            whether expert parallelism distributes them.
        experts: the number of experts of a layer.

    Raises:
        CppmegaError: `part-without-gradient`.
    """
    lost = _lost(ranks)
    idle = _of_idle_experts(lost, experts)
    if refused := [each for each in lost if each not in idle]:
        raise CppmegaError(
            "part-without-gradient",
            f"{len(refused)} parameters had no gradient in the first {STEPS} steps: "
            f"{_named(refused)}.",
            "No loss reaches them, or no token: they keep their first values, and the model is "
            "smaller than it claims to be.",
            "inspect what should use them: routing for experts, the loss for MTP depths, ids that "
            "differ for the embedding of structure; cppmega status shows which patches are applied",
        )
    return sorted(idle)


def _of_expert(place: tuple[int, ...]) -> str:
    return f", expert rank {place[2]}" if len(place) > 2 else ""


def _place() -> Place:
    from megatron.core import parallel_state

    return (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
    )


def _gathered(mine: Any) -> list[Any]:
    import torch

    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    return everyone
