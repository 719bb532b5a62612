"""The passes in flight in the stages of a recipe's pipeline.

Rank r of a pipeline of P ranks has the stages r, r + P, r + 2P..., as Megatron assigns them.
"""

from __future__ import annotations

from collections import Counter

from cppmega.recipe.fields import Fields


def under_way(recipe: Fields, rank: int) -> list[Counter[int]]:
    """How many forward passes of each stage wait for their backward pass on a pipeline rank.

    Args:
        recipe: the run.
        rank: of the pipeline.

    Returns:
        Every combination that occurs after a forward pass in a step of 1F1B, or of the interleaved
        schedule where ranks have several stages: stage of this rank, from 0, -> passes.
    """
    ranks, each = recipe.pipeline_model_parallel_size, recipe.virtual_pipeline_model_parallel_size
    count = recipe.micro_batches
    warm = ranks - rank - 1
    if each > 1:
        warm = 2 * warm + (each - 1) * ranks
    forward = [
        stage
        for first in range(0, count, ranks)
        for stage in range(each)
        for _ in range(min(ranks, count - first))
    ]
    kept: Counter[int] = Counter()
    mixtures: dict[tuple[tuple[int, int], ...], Counter[int]] = {}
    for number, stage in enumerate(forward):
        if number > warm:
            kept[each - 1 - forward[number - warm - 1]] -= 1
        kept[stage] += 1
        mixtures.setdefault(tuple(sorted((+kept).items())), +kept)
    return list(mixtures.values())
