"""Sizes of mixers: how ranks get them, what they do not go with, and checkpoints of others."""

from __future__ import annotations

import itertools

import pytest

from cppmega.errors import CppmegaError
from cppmega.recipe import index as recipes_index
from cppmega.recipe.render import missing, render
from cppmega.sizes import mixers as sizes
from cppmega.sizes import stated as environment_sizes
from cppmega.training.requirements import Start

MAMBA3 = sizes.Mamba3(groups=4, rank=2)
M2RNN = sizes.M2RNN(conv=3, gradient_clipping=0.5)
WHOLE = recipes_index.load("nam56r_h200_8gpu_bf16")
STATED = {"CPPMEGA_MAMBA3": environment_sizes.text(MAMBA3)}


def test_ranks_read_what_the_recipe_states() -> None:
    recipe = WHOLE.with_(mamba3=MAMBA3, m2rnn=M2RNN)
    environment = dict(render(recipe, "0.19.2").environment)
    assert sizes.mamba3(environment) == MAMBA3 and sizes.m2rnn(environment) == M2RNN
    plain = recipe.with_(pattern="D-E")
    without = dict(render(plain, "0.19.2").environment)
    assert sizes.mamba3(without) is sizes.m2rnn(without) is None
    with pytest.raises(CppmegaError, match="CPPMEGA_MAMBA3") as caught:
        Start(plain, environ=STATED).check("variables")
    assert caught.value.name == "recipe-differs"


def test_megatron_counts_with_the_recipes_sizes() -> None:
    argv = render(WHOLE, "0.19.2").argv
    given = dict(itertools.pairwise(argv))
    names = ("state-dim", "head-dim", "num-groups", "num-heads")
    assert [given[f"--mamba-{name}"] for name in names] == ["128", "64", "8", "128"]
    assert not [word for word in render(WHOLE, "0.18.2").argv if word.startswith("--mamba")]


def test_older_releases_say_which_one_has_them() -> None:
    assert not missing(WHOLE, "0.19.2")
    reasons = {gap.part: gap.reason for gap in missing(WHOLE, "0.18.2")}
    for part in ("13 layers M (Mamba-3)", "4 layers R (M2RNN)"):
        assert reasons[part] == "cppmega adds it to megatron-core 0.19, and not to 0.18.2"


@pytest.mark.parametrize(
    ("mamba3", "mamba_ssm", "mimo"),
    [
        (sizes.Mamba3(), False, False),
        (sizes.Mamba3(rank=1), False, False),
        (sizes.Mamba3(out_norm=True), True, True),
        (sizes.Mamba3(rope_fraction=1.0), True, True),
    ],
)
def test_mamba_ssm_is_needed_for_what_our_scan_does_not_support(
    mamba3: sizes.Mamba3, mamba_ssm: bool, mimo: bool
) -> None:
    recipe = recipes_index.load("nam56r_h200_slice").with_(pattern="DEM-", mamba3=mamba3)
    assert (recipe.uses_mamba_ssm, recipe.uses_mimo) == (mamba_ssm, mimo)


@pytest.mark.parametrize(
    ("text", "bound"),
    [("{}", 1.0), ('{"gradient_clipping": 2}', 2.0), ('{"gradient_clipping": null}', None)],
)
def test_gradients_of_m2rnns_states_are_clipped_at_1_unless_stated(
    text: str, bound: float | None
) -> None:
    assert sizes.m2rnn({"CPPMEGA_M2RNN": text}) == sizes.M2RNN(gradient_clipping=bound)


@pytest.mark.parametrize("bound", [0.0, -1.0, float("inf")])
def test_a_bound_of_gradients_is_above_zero_and_finite(bound: float) -> None:
    with pytest.raises(CppmegaError, match="gradient_clipping") as caught:
        WHOLE.with_(m2rnn=sizes.M2RNN(gradient_clipping=bound))
    assert caught.value.name == "recipe-invalid"


@pytest.mark.parametrize("text", ["1", "{", '{"groups": 0}', '{"rope_fraction": 0.3}'])
def test_a_text_without_sense_is_refused(text: str) -> None:
    with pytest.raises(CppmegaError) as caught:
        sizes.mamba3({"CPPMEGA_MAMBA3": text})
    assert caught.value.name == "sizes-misstated"
