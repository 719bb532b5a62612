"""The stages of a recipe's pipeline: whether they can be trained, and the passes in flight in them.

Rank r of a pipeline of P ranks has the stages r, r + P, r + 2P..., as Megatron assigns them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from cppmega.errors import CppmegaError
from cppmega.features.dsa import layer_kinds as dsa_layer_kinds
from cppmega.host.wording import counted
from cppmega.recipe.fields import Fields, invalid


def check_stages(recipe: Fields) -> None:
    """Refuse layers that do not form as many stages as the recipe has.

    Raises:
        CppmegaError: `recipe-invalid`, `bad-pattern`.
    """
    ranks, each = recipe.pipeline_model_parallel_size, recipe.virtual_pipeline_model_parallel_size
    if each > 1 and ranks == 1:
        raise invalid(
            recipe,
            f"virtual_pipeline_model_parallel_size={each} without pipeline ranks.",
            "The stages of a single rank have no other rank's stages to alternate with.",
            "--set pipeline_model_parallel_size=2, or --set virtual_pipeline_model_parallel_size=1",
        )
    layout, wanted = recipe.layout, recipe.stages
    asked = f"PP {ranks} x VPP {each} = {wanted} stages"
    if recipe.kind != "hybrid":
        if recipe.num_layers % wanted:
            raise invalid(
                recipe,
                f"num_layers={recipe.num_layers} does not divide into {asked}.",
                "Every stage of a GPT has the same number of layers.",
            )
    elif layout.stages != wanted or "" in recipe.layers_by_stage:
        marked = f"marks {layout.stages} stages" if layout.stages > 1 else "does not divide evenly"
        empty = "" if layout.stages != wanted else ", one of them empty"
        raise CppmegaError(
            "bad-pattern",
            f"Pattern {recipe.pattern!r} {marked}{empty}, and the recipe has {asked}.",
            "Every rank needs the same number of stages, with a layer in each.",
            "one | between any two stages, or other values of pipeline_model_parallel_size and "
            "virtual_pipeline_model_parallel_size",
        )


def check_schedule(recipe: Fields) -> None:
    """Refuse micro-batches that the interleaved schedule cannot handle.

    Raises:
        CppmegaError: `recipe-invalid`.
    """
    ranks, count = recipe.pipeline_model_parallel_size, recipe.micro_batches
    if recipe.virtual_pipeline_model_parallel_size > 1 and count % ranks:
        more = recipe.global_batch_size // count * (count + ranks - count % ranks)
        raise invalid(
            recipe,
            f"{counted(count, 'micro-batch', 'micro-batches')} per step on {ranks} ranks with "
            "virtual stages.",
            "Megatron's interleaved schedule needs groups of as many as there are ranks.",
            f"--set global_batch_size={more}",
        )


def dsa_stages(recipe: Fields) -> Iterator[list[int]]:
    """The numbers of the DSA layers of every stage of the trunk, virtual ones too."""
    if recipe.kind == "hybrid":
        yield from dsa_layer_kinds.marked_stages(recipe.layout.main)
    else:  # every layer has attention, and its MLP has no separate number
        letters = ["D" if recipe.uses_dsa else "*"] * recipe.num_layers
        yield from dsa_layer_kinds.even_stages(letters, recipe.stages)


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
