"""Preflight of the recipe and of the arguments beside it: each check broken, and each healthy."""

from __future__ import annotations

from pathlib import Path

import pytest

from cppmega.catalogue import decisions
from cppmega.errors import CppmegaError
from cppmega.recipe import index as recipes_index
from tests.preflight.contexts import SLICE, SMOKE, holds, launch, refuses, says_nothing
from tests.preflight.datasets import on
from tests.support import REPOSITORY, patched, pristine

pytestmark = pytest.mark.slow


def test_recipe_complete(tmp_path: Path) -> None:
    assert "nothing left out" in holds("recipe_complete", on(None))
    whole = recipes_index.load("nam56r_h200_8gpu_bf16")
    assert "nothing left out" in holds("recipe_complete", on(None, recipe=whole))
    older = launch(whole, root=patched("0.18.2"))
    said = refuses("recipe_complete", "recipe-not-complete", older).what
    assert "13 layers M (Mamba-3): cppmega adds it to megatron-core 0.19" in said
    library = launch(SLICE, root=pristine("0.16.1"))
    refuses("recipe_complete", "training-not-in-wheel", library)
    says_nothing("recipe_complete", on(None, recipe=SMOKE))
    says_nothing("recipe_complete", launch(root=patched("0.19.2")))


def test_a_file_with_the_name_of_a_shipped_recipe(tmp_path: Path) -> None:
    file = tmp_path / "nam56r_h200_slice.py"
    file.write_text(
        "from cppmega.recipe.index import load\nRECIPE = load('nam56r_h200_slice').with_(lr=1e-3)\n"
    )
    mine = recipes_index.load(str(file))
    found = refuses("recipe_complete", "two-recipes", on(None, recipe=mine, recipe_file=file))
    assert "different" in found.what
    shipped = REPOSITORY / "recipes" / "nam56r_h200_slice.py"
    holds("recipe_complete", on(None, recipe_file=shipped))


def test_words_that_no_trainer_takes() -> None:
    with pytest.raises(CppmegaError, match="often") as caught:
        launch(SLICE, "--save-interval", "often", root=patched("0.19.2"))
    assert caught.value.name == "wrong-usage"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--jsn",), "--jsn"),
        (("--", "--lr", "3"), "--lr 3"),
        (("--mock-data",), "--mock-data"),
        (("--data", "a", "--data", "b"), "not 2"),
    ],
)
def test_words_that_a_loop_on_cpu_does_not_take(words: tuple[str, ...], said: str) -> None:
    context = launch(SMOKE, *words, root=patched("0.19.2"))
    assert said in refuses("recipe_complete", "not-supported", context).what


def test_arguments_that_are_the_recipes_or_the_trainers() -> None:
    harmless = on(None, "--mock-data", "--save", "here", "--", "--log-params-norm")
    holds("owned_arguments", harmless)
    says_nothing("owned_arguments", launch(None, "--lr", "1", root=patched("0.19.2")))
    for words, instead in (
        (("--save", "/elsewhere"), "--save /elsewhere before the --"),
        (("--data-path=x",), "--data x before the --"),
        (("--micro-batch-size", "7"), "--set micro_batch_size=7"),
        (("--qk-layernorm", "--lr=1"), "--set qk_layernorm=True"),
    ):
        asked = on(None, "--mock-data", "--", *words)
        assert refuses("owned_arguments", "argument-not-megatrons", asked).next == instead
    own = on(None, "--mock-data", recipe=SLICE.plus("--lr", "1"))
    refuses("owned_arguments", "argument-not-megatrons", own)


def test_the_dispatcher_of_another_package_is_chosen_as_its_row_says() -> None:
    _, _, words = decisions.load()["hybridep"].instead.partition("launch with --set ")
    changes = words.partition(";")[0].split(" --set ")
    recipe = recipes_index.with_text(recipes_index.load("nam56r_h200_8gpu_bf16"), changes)
    holds("owned_arguments", on(None, "--mock-data", recipe=recipe))
