"""NAM56R's recipes: one model in every layout, which fits by the estimate and is named right."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cppmega.catalogue import loader as catalogue
from cppmega.cli import recipes_list
from cppmega.errors import CppmegaError
from cppmega.overlay.wanted import wanted_patches
from cppmega.recipe import Recipe
from cppmega.recipe import index as recipes_index
from cppmega.recipe.arithmetic import parameters
from cppmega.recipe.memory import estimate

H200, H100 = 139.0, 79.0
"""GiB that a process can use."""
NEAR = 0.92
"""Share of them above which the preflight says that only a trial can tell."""
ALONE, NEAR_ALONE = "nam56r_h200_1gpu", 0.94
"""With everything kept, it was measured at 133.2 GiB, one below the estimate."""
WHOLE = (
    *("nam56r_h200_1gpu", "nam56r_h200_2gpu_ep2", "nam56r_full_h200_4gpu"),
    *("nam56r_h200_8gpu_bf16", "nam56r_h200_8gpu_fp8"),
    *("nam56r_full_h200_2gpu_pp2", "nam56r_full_h200_2gpu_pp2_vpp2"),
    *("nam56r_full_h200_4gpu_mbs4", "nam56r_full_h200_4gpu_pp2_vpp2"),
)
SHARED, CUT = "nam56r_h200_2gpu_ep2_index_share", "nam56r_h100_1gpu_cut"
FAMILY = {name: recipes_index.load(name) for name in (*WHOLE, SHARED, CUT)}
PAGES = catalogue.load()


def layers(recipe: Recipe) -> str:
    """The pattern without the marks of stages."""
    return replace(recipe.layout, main=recipe.layout.trunk).render()


@pytest.mark.parametrize("name", WHOLE)
def test_every_layout_is_of_the_same_model(name: str) -> None:
    recipe, first = FAMILY[name], FAMILY[WHOLE[0]]
    assert parameters(recipe) == parameters(first)
    assert layers(recipe) == layers(first) and recipe.vocab_size == 65_536
    assert recipe.uses_linear_cross_entropy and not recipe.cut
    assert recipe.indexers == 9  # every DSA layer of the trunk is Full


@pytest.mark.parametrize("name", FAMILY)
def test_it_fits_by_the_estimate_with_room_to_spare(name: str) -> None:
    recipe = FAMILY[name]
    limit = NEAR_ALONE if name == ALONE else NEAR
    assert estimate(recipe, attends=True).gib < limit * (H200 if name != CUT else H100)


FP8 = ("precision=fp8", "fp8_recipe=tensorwise")
FP8_EXPERTS = (*FP8, "gates=(('CPPMEGA_SELECTIVE_FP8_MOE', '1'),)")


@pytest.mark.parametrize(
    ("name", "changes", "measured"),
    [
        (ALONE, (), 126.8),
        (ALONE, FP8_EXPERTS, 128.9),
        ("nam56r_h200_2gpu_ep2", (), 125.9),
        ("nam56r_h200_2gpu_ep2", FP8, 124.3),
        ("nam56r_full_h200_4gpu_mbs4", (), 108.2),
        ("nam56r_full_h200_2gpu_pp2", (), 117.0),
        ("nam56r_full_h200_2gpu_pp2_vpp2", (), 96.1),
    ],
)
def test_the_estimate_is_near_the_peak_that_was_measured(
    name: str, changes: tuple[str, ...], measured: float
) -> None:
    """On H200; `benchmarks/results/nam56r_step_designs.md` has the runs."""
    recipe = recipes_index.with_text(FAMILY[name], changes)
    assert estimate(recipe, attends=True).gib == pytest.approx(measured, rel=0.03)


def test_one_gpu_has_no_room_for_all_weights_in_fp8_as_well() -> None:
    """It was out of memory at 133.9 GiB."""
    recipe = recipes_index.with_text(FAMILY[ALONE], FP8)
    assert estimate(recipe, attends=True).gib > 133.9


@pytest.mark.parametrize("name", (*WHOLE, SHARED))
def test_twice_the_vocabulary_fits_by_the_estimate(name: str) -> None:
    changes = ["vocab_size=131072", *(["micro_batch_size=1"] if name == ALONE else [])]
    recipe = recipes_index.with_text(FAMILY[name], changes)
    added = parameters(recipe).total - parameters(FAMILY[name]).total
    assert added == 2 * 65_536 * 4096
    assert estimate(recipe, attends=True).gib < H200


def test_what_is_recomputed_is_what_has_to_be() -> None:
    """With the activations of Mamba layers and experts kept, the record's batch does not fit."""
    lighter = {"recompute_modules": ("moe_act", "mlp", "mla_up_proj"), "gates": ()}
    for name in ("nam56r_full_h200_4gpu", "nam56r_h200_8gpu_bf16", "nam56r_h200_8gpu_fp8"):
        recipe = FAMILY[name]
        assert recipe.micro_batch_size >= 8
        assert bool(recipe.gates) is ("moe" not in recipe.recompute_modules), "one is enough"
        assert estimate(recipe.with_(**lighter), attends=True).gib > H200, name


@pytest.mark.parametrize("name", FAMILY)
def test_its_name_and_its_purpose_say_the_layout(name: str) -> None:
    recipe = FAMILY[name]
    tensor, pipeline = recipe.tensor_model_parallel_size, recipe.pipeline_model_parallel_size
    virtual, expert = (
        recipe.virtual_pipeline_model_parallel_size,
        recipe.expert_model_parallel_size,
    )
    assert f"_{recipe.gpus}gpu" in name and tensor == 1
    assert (f"_pp{pipeline}" in name) == (pipeline > 1) == (f"PP {pipeline}" in recipe.purpose)
    assert (f"_vpp{virtual}" in name) == (virtual > 1) == (f"VPP {virtual}" in recipe.purpose)
    assert (expert > 1) == (f"EP {expert}" in recipe.purpose)
    assert ("sparse" if recipe.dsa_indexer_use_sparse_loss else "dense") in recipe.purpose
    assert "dense indexer loss" in recipe.purpose
    described = recipes_list.describe(recipe, PAGES, ())
    assert not described["missing"]


def test_a_step_is_as_many_tokens_on_every_gpu_as_in_the_record() -> None:
    for name, recipe in FAMILY.items():
        tokens = recipe.global_batch_size * recipe.seq_length / recipe.gpus
        assert tokens == (40_960 if name == "nam56r_h200_8gpu_fp8" else 32_768), name


def test_shared_layers_have_no_indexer() -> None:
    shared, whole = FAMILY[SHARED], FAMILY["nam56r_h200_2gpu_ep2"]
    assert shared.dsa_index_pattern == "FSSFSSFSS" and shared.indexers == 3
    assert parameters(shared).total < parameters(whole).total
    assert "dsa_index_share" in wanted_patches(shared, PAGES)
    assert ("CPPMEGA_INDEX_CACHE", "1") in shared.wanted_gates


def test_the_cut_model_is_the_beginning_of_the_whole_one() -> None:
    cut, whole = FAMILY[CUT], FAMILY["nam56r_h200_1gpu"]
    assert whole.layout.trunk.startswith(cut.layout.trunk)
    assert cut.cut == f"{len(cut.layout.trunk)} of {len(whole.layout.trunk)} layers"
    assert set(cut.layout.letters) == set(whole.layout.letters) and cut.layout.depths == 2
    same = {"name": whole.name, "purpose": "", "cut": "", "pattern": whole.pattern}
    for_less_memory = {"micro_batch_size": whole.micro_batch_size, "gates": ()}
    assert replace(cut, **same, **for_less_memory) == replace(whole, purpose="")
    with pytest.raises(CppmegaError, match="does not match its name"):
        cut.with_(name="nam56r_h100_1gpu")
    with pytest.raises(CppmegaError, match="does not match its name"):
        cut.with_(cut="")
    with pytest.raises(CppmegaError, match="Did you mean nam56r_h100_1gpu_cut"):
        recipes_index.load("nam56r_h100_1gpu")
