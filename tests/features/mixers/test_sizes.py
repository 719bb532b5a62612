"""Sizes of mixers: how ranks get them, what they do not go with, and checkpoints of others."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from cppmega.errors import CppmegaError
from cppmega.features import environment_sizes
from cppmega.features.mixers import sizes
from cppmega.recipe import index as recipes_index
from cppmega.recipe.render import missing, render
from cppmega.training import requirements

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
        requirements.check_gates(plain, STATED)
    assert caught.value.name == "variable-differs"


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
        (sizes.Mamba3(rank=1), True, False),
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


@pytest.mark.parametrize(
    ("arguments", "name", "said"),
    [
        ({"context_parallel_size": 2}, "mixer-not-supported", "context parallelism"),
        ({"use_megatron_fsdp": True}, "mixer-not-supported", "FSDP"),
        ({"use_mup": True}, "mixer-not-supported", "MuP"),
        ({"init_model_with_meta_device": True}, "mixer-not-supported", "meta device"),
        ({"fp32_residual_connection": True}, "mixer-not-supported", "fp32-residual"),
        (
            {"cuda_graph_impl": "local", "cuda_graph_modules": ["attn", "mamba"]},
            "mixer-not-supported",
            "graphs of Mamba layers (local)",
        ),
        (
            {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": []},
            "mixer-not-supported",
            "graphs of Mamba layers (transformer_engine)",
        ),
        ({"hidden_size": 80}, "mamba3-heads", "2 x 80 channels"),
        (
            {"hidden_size": 256, "tensor_model_parallel_size": 8},
            "mamba3-tensor-parallel",
            "4 groups of Mamba-3 cannot be split over 8",
        ),
    ],
)
def test_what_the_mixers_do_not_go_with_is_named(
    arguments: dict[str, object], name: str, said: str
) -> None:
    (found,) = sizes.obstacles(SimpleNamespace(**arguments), STATED)
    assert found.name == name and said in found.what
    assert not [*sizes.obstacles(SimpleNamespace(**arguments), {})]
    allowed = {"context_parallel_size": 1, "cuda_graph_impl": "local", "hidden_size": 256}
    allowed["cuda_graph_modules"] = ["attn"]
    assert not [*sizes.obstacles(SimpleNamespace(**allowed), STATED)]


@pytest.mark.parametrize(
    ("arguments", "name", "said"),
    [
        ({"hidden_size": 79}, "m2rnn-heads", "width of 79"),
        ({"tensor_model_parallel_size": 2}, "m2rnn-tensor-parallel", "2 tensor-parallel"),
        ({"fp16": True}, "mixer-not-supported", "--fp16"),
        ({"fp4": "e2m1"}, "mixer-not-supported", "--fp4-format"),
        ({"fp8": "hybrid", "fp8_recipe": "delayed"}, "mixer-not-supported", "--fp8-recipe"),
        ({"context_parallel_size": 2}, "mixer-not-supported", "context parallelism"),
    ],
)
def test_what_m2rnn_does_not_go_with_is_named(
    arguments: dict[str, object], name: str, said: str
) -> None:
    stated = {"CPPMEGA_M2RNN": environment_sizes.text(M2RNN)}
    (found,) = sizes.obstacles(SimpleNamespace(**arguments), stated)
    assert found.name == name and said in found.what
    allowed = {"hidden_size": 80, "fp8": "hybrid", "fp8_recipe": "tensorwise"}
    assert not [*sizes.obstacles(SimpleNamespace(**allowed), stated)]


@pytest.mark.parametrize(
    ("saved", "environ", "said"),
    [
        ("decay_softplus", STATED, None),
        ("decay_heavy_tail", STATED, "compute A by heavy_tail; this run's, by softplus"),
        ("decay_softplus", {}, "by softplus; this run's, by no Mamba-3"),
        ("A_log", STATED, "by no Mamba-3; this run's, by softplus"),
        ("A_log", {}, None),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    saved: str, environ: dict[str, str], said: str | None
) -> None:
    found = [*sizes.other_models({f"decoder.layers.0.mixer.{saved}": (1,)}, environ)]
    assert not [*sizes.other_models({}, environ)]
    assert [each.name for each in found] == ["mamba3-other-definition"] * (said is not None)
    assert said is None or said in found[0].what
