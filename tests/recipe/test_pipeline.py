"""Stages of a pipeline: refused where none could be trained, and counted as Megatron runs them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cppmega.errors import CppmegaError
from cppmega.recipe import M2RNN, Mamba3, NgramHash, Recipe, Structure
from cppmega.recipe import index as recipes_index
from cppmega.recipe.arithmetic import flops, parameters
from cppmega.recipe.memory import GIB, estimate
from cppmega.recipe.pipeline import under_way
from tests.recipe.test_arithmetic import BASE, line
from tests.support import patched, python

WHOLE = recipes_index.load("nam56r_h200_2gpu_ep2")
PIPELINE = {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 1}
VIRTUAL = {**PIPELINE, "virtual_pipeline_model_parallel_size": 2}
PAGES = (
    *("input_embeddings", "mtp_roll_packed_sequences"),
    "fully_reshardable_bucket_padding",
)
RANKS = """
from tests.recipe import virtual_stage_ranks

virtual_stage_ranks.report(["compared"])
"""

BUILD = """
from unittest import mock

from cppmega.proof import cpu_shims
from tests.support.te_stand_ins import install

with mock.patch.object(cpu_shims, "init_distributed", cpu_shims.shim):
    install()  # every rank forms its own groups
from tests.recipe import virtual_stage_build

virtual_stage_build.main()
"""


def small(**changes: object) -> Recipe:
    """A GPT of eight layers on two ranks with two stages each."""
    sizes = {"pattern": "", "attention": "mla", "num_layers": 8, "mamba3": None, "m2rnn": None}
    return WHOLE.with_(kind="gpt", **VIRTUAL, **{**sizes, **changes})


def test_stages_are_those_that_the_pattern_marks_or_equally_long() -> None:
    even = WHOLE.with_(**VIRTUAL).layers_by_stage
    assert [len(letters) for letters in even] == [13] * 4
    assert "".join(even) == WHOLE.layout.trunk
    marked = WHOLE.with_(pattern="DE|M-M|R|+/+-", **VIRTUAL)
    assert marked.layers_by_stage == ("DE", "M-M", "R", "+")
    assert (marked.layout.trunk, marked.layout.depths) == ("DEM-MR+", 1)
    assert small().layers_by_stage == ("+E+E",) * 4
    assert WHOLE.layers_by_stage == (WHOLE.layout.trunk,)


@pytest.mark.parametrize(
    ("changes", "name", "said"),
    [
        ({"virtual_pipeline_model_parallel_size": 2}, "recipe-invalid", "without pipeline ranks"),
        ({**VIRTUAL, "pattern": "DE|M-/+-"}, "bad-pattern", "marks 2 stages"),
        ({**VIRTUAL, "pattern": "DEM-M/+-"}, "bad-pattern", "does not divide evenly"),
        ({**VIRTUAL, "pattern": "DE||M|-/+-"}, "bad-pattern", "has an empty stage"),
        ({**PIPELINE, "pattern": "DE|M|-|E/+-"}, "bad-pattern", "PP 2 x VPP 1 = 2 stages"),
        ({"pattern": "DE|M-/+-"}, "bad-pattern", "PP 1 x VPP 1 = 1 stages"),
        (
            {**VIRTUAL, "micro_batch_size": 4, "global_batch_size": 12},
            "recipe-invalid",
            "3 micro-batches per step on 2 ranks",
        ),
        (
            {**VIRTUAL, "dsa_index_pattern": "FSSFSSFSS"},
            "dsa-index-sharing",
            "Chosen keys do not cross pipeline stages",
        ),
    ],
)
def test_stages_that_cannot_be_trained_are_refused(
    changes: dict[str, object], name: str, said: str
) -> None:
    with pytest.raises(CppmegaError) as caught:
        WHOLE.with_(**changes)
    assert caught.value.name == name
    assert said in f"{caught.value.what} {caught.value.why}"


def test_advice_about_micro_batches_holds() -> None:
    with pytest.raises(CppmegaError) as caught:
        WHOLE.with_(**VIRTUAL, micro_batch_size=4, global_batch_size=12)
    words = caught.value.next.removeprefix("--set ")
    asked = recipes_index.with_text(WHOLE.with_(**VIRTUAL), [words])
    assert asked.micro_batches == 4


def test_layers_of_a_gpt_divide_into_its_stages() -> None:
    with pytest.raises(CppmegaError, match="num_layers=6 is not a multiple of"):
        small(num_layers=6)


def test_nine_full_layers_may_begin_any_stage() -> None:
    shared = WHOLE.with_(dsa_index_pattern="FSSFSSFSS")
    for layout in (PIPELINE, VIRTUAL):
        with pytest.raises(CppmegaError, match="dsa-index-sharing"):
            shared.with_(**layout)
        assert shared.with_(dsa_index_pattern="F" * 9, **layout).indexers == 9


def test_stages_change_neither_the_model_nor_what_a_token_costs() -> None:
    split = WHOLE.with_(**VIRTUAL)
    assert parameters(split) == parameters(WHOLE)
    assert flops(split) == flops(WHOLE)


def test_a_rank_holds_the_states_of_its_stages() -> None:
    """The last one also those of the head, of MTP, and of a second copy of the embeddings."""
    for layout in (PIPELINE, VIRTUAL):
        split = WHOLE.with_(**layout, micro_batch_size=1)
        here = "".join(split.layers_by_stage[1::2])
        part = WHOLE.with_(pattern=f"{here}/+-/+-", dsa_index_pattern="")
        assert estimate(split, attends=True).states == 18 * parameters(part).total
    assert estimate(split, attends=True).states == pytest.approx(58.9 * GIB, rel=1e-3)


def test_virtual_stages_keep_one_layer_more_of_four() -> None:
    """Rank 0 has two passes through two layers under way, or five through one."""
    sizes = {"mamba3": None, "m2rnn": None, "ngram_hash": None, "structure": None, "gates": ()}
    tiny = WHOLE.with_(pattern="EEEE", vocab_size=128, cross_entropy_fusion_impl="native", **sizes)
    recomputed = tiny.with_(recompute_modules=("moe",), micro_batch_size=1)
    plain, virtual = (estimate(recomputed.with_(**layout)) for layout in (PIPELINE, VIRTUAL))
    layer = 2 * 2 * 4096 * 4096  # its input and its normalised copy, in bf16
    assert virtual.activations - plain.activations == layer
    # The layer that runs backward has its own activations once more, however many are recomputed.
    routed = 2 * 4096 * 4096 * 4 + 2 * 2 * 4096 * (4 * 896 + 1024)
    assert plain.activations == 4 * layer + routed


@pytest.fixture(name="ran", scope="module")
def trained_on_two_ranks() -> dict[str, Any]:
    """A model with n-grams, structure and two MTP depths, from a checkpoint any layout loads."""
    done = python(patched("0.19.2", *PAGES), RANKS)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])["compared"]
    assert isinstance(found, dict), found
    return found


@pytest.mark.slow
@pytest.mark.megatron
@pytest.mark.parametrize("each", [1, 2])
def test_two_ranks_train_as_one(ran: dict[str, Any], each: int) -> None:
    found = ran[str(each)]
    for step, alone in enumerate(ran["alone"]):
        losses = [loss for rank in found["rows"] for loss in rank[step]["losses"]]
        assert losses == pytest.approx(alone["losses"], rel=1e-5)
        norms = [rank[step]["gradient"] for rank in found["rows"]]
        assert norms == pytest.approx([alone["gradient"]] * 2, rel=1e-5)
    assert ran["alone"][0]["losses"] != ran["alone"][1]["losses"]
    assert found["apart"] < 1e-6
    first, last = found["parts"]
    assert first == [["decoder", "embedding"], ["decoder"]][:each]
    assert last == [["decoder"], ["decoder", "embedding", "mtp", "output_layer"]][-each:]


@pytest.mark.slow
@pytest.mark.megatron
@pytest.mark.parametrize("each", [1, 2])
def test_as_much_is_under_way_as_in_megatrons_own_schedule(ran: dict[str, Any], each: int) -> None:
    layout = WHOLE.with_(
        **{**VIRTUAL, "virtual_pipeline_model_parallel_size": each}, micro_batch_size=4
    )
    assert layout.micro_batches == 4
    for rank, mixtures in enumerate(ran[str(each)]["mixtures"]):
        seen = {tuple(sorted((int(stage), n) for stage, n in one.items())) for one in mixtures}
        assert seen == {tuple(sorted(one.items())) for one in under_way(layout, rank)}


@pytest.mark.slow
@pytest.mark.megatron
def test_megatron_builds_the_stages_that_are_counted() -> None:
    """From a rendered line with every letter, n-grams, structure and two MTP depths."""
    recipe = BASE.with_(
        gpus=2,
        pattern="DE+EM-R-M-DE/+-/+-",
        dsa_index_pattern="FF",
        mamba3=Mamba3(head_dim=16, state_dim=32),
        m2rnn=M2RNN(5, 3, 3),
        ngram_hash=NgramHash((2,), 2, (89, 97), 4),
        structure=Structure(bottleneck=6),
        num_experts=4,
        global_batch_size=2,
        **VIRTUAL,
    )
    case = json.dumps([line(recipe), recipe.padded_vocab_size, 2, dict(recipe.variables)])
    done = python(patched("0.19.2", "own_mixers", "input_embeddings"), BUILD, env={"CASE": case})
    assert "ANSWER" in done.stdout, done.stderr[-3000:]
    ranks = json.loads(done.stdout.partition("ANSWER")[2])
    layers = [len(letters) for letters in recipe.layers_by_stage]
    assert [[stage["layers"] for stage in rank] for rank in ranks] == [layers[0::2], layers[1::2]]
    assert ranks[1][1]["parts"] == ["decoder", "embedding", "mtp", "output_layer"]
    first, last = (sum(stage["parameters"] for stage in rank) for rank in ranks)
    assert estimate(recipe).states == 18 * last and last > first
    whole = parameters(recipe)
    again = whole.embedding + whole.extras["ngram_hash"] + whole.extras["structure"]
    assert first + last == whole.total + again
