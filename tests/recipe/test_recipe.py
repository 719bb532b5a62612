"""Recipes: additive, typed, refused where they contradict themselves, found by name and by path."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cppmega.catalogue import loader as catalogue
from cppmega.cli import recipes_list
from cppmega.errors import CppmegaError
from cppmega.recipe import Mamba2, Mamba3, NgramHash, Recipe, layer_pattern, results
from cppmega.recipe import index as recipes_index
from cppmega.recipe.render import render
from examples.smoke.training_step import learning_rate

SLICE = recipes_index.load("nam56r_h200_slice")
PIPELINE = {"pipeline_model_parallel_size": 2}
V32 = recipes_index.load("dsv32_h200_slice")


def refused(name: str, **changes: object) -> CppmegaError:
    """The named error that changing the slice in this way raises."""
    with pytest.raises(CppmegaError) as caught:
        SLICE.with_(**changes)
    assert caught.value.name == name, caught.value.render()
    return caught.value


def test_with_changes_one_field_and_keeps_every_other() -> None:
    changed = SLICE.with_(micro_batch_size=2, global_batch_size=2)
    assert changed.micro_batch_size == 2
    assert changed.with_(micro_batch_size=1, global_batch_size=1) == SLICE


def test_an_unknown_field_names_the_nearest_one() -> None:
    assert "micro_batch_size" in refused("unknown-field", micro_batch=8).what


def test_further_arguments_are_added_and_never_replaced() -> None:
    twice = SLICE.plus("--moe-permute-fusion").plus("--log-params-norm")
    assert twice.arguments == ("--moe-permute-fusion", "--log-params-norm")
    assert "plus" in refused("unknown-field", arguments=("--log-params-norm",)).next


@pytest.mark.parametrize(
    "argument", ["--no-check-for-nan-in-loss-and-grad", "--mock-data", "--mock-data=1", "--fp16"]
)
def test_no_recipe_can_switch_off_nan_checks_or_turn_on_mock_data(argument: str) -> None:
    with pytest.raises(CppmegaError, match="recipe-invalid"):
        SLICE.plus(argument)


def test_precision_has_no_default() -> None:
    with pytest.raises(TypeError, match="precision"):
        Recipe(  # type: ignore[call-arg]
            name="x",
            purpose="",
            kind="gpt",
            gpus=1,
            num_layers=1,
            hidden_size=64,
            ffn_hidden_size=64,
            num_attention_heads=8,
            seq_length=64,
            vocab_size=128,
        )
    assert "bf16" in refused("recipe-invalid", precision="bf61").what


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pattern": "DE+XDE/D-/D-"}, "character 4, 'X'"),
        ({"pattern": "DE+EDE/D-/E-"}, "depths differ"),
        ({"pattern": "*EDE"}, "mixes * with D"),
        ({"pattern": "/D-"}, "no trunk"),
        ({"pattern": "DE/D-|"}, "holds a |"),
        ({"pattern": "DE/"}, "depth is empty"),
    ],
)
def test_a_broken_pattern_says_where(changes: dict[str, str], said: str) -> None:
    assert said in refused("bad-pattern", **changes).what


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"hidden_size": 4100}, "hidden_size=4100"),
        ({"moe_ffn_hidden_size": 900}, "moe_ffn_hidden_size=900"),
        ({"precision": "fp8", "ffn_hidden_size": 21512}, "ffn_hidden_size=21512"),
        ({"precision": "fp8", "num_attention_heads": 12}, "12 attention heads"),
    ],
)
def test_a_broken_width_names_the_next_one_that_fits(
    changes: dict[str, object], field: str
) -> None:
    error = refused("width-not-aligned", **changes)
    assert field in error.what
    if "heads" not in field:
        fixed = int(error.next.partition("=")[2].rstrip(")"))
        SLICE.with_(**{**changes, field.partition("=")[0]: fixed})  # the advice must hold


@pytest.mark.parametrize(
    "changes",
    [
        {"num_experts": None},
        {"num_experts": 2},  # top-k 4
        {"moe_router_score_function": "softmax"},  # has an expert bias
        {"dsa_indexer_topk": 8192},
        {"dsa_indexer_head_dim": 72},
        {"kv_lora_rank": None},
        {"num_query_groups": 4},
        {"global_batch_size": 3, "micro_batch_size": 2},
        {"gpus": 3, "pipeline_model_parallel_size": 2},
        {"expert_model_parallel_size": 5},
        {"overlap_param_gather": True},
        {"dist_ckpt_optim_fully_reshardable": True, "use_distributed_optimizer": False},
        {"cuda_graph_modules": ("attn",)},
        {"document_multiple": 8},
        {"precision": "fp32"},
        {"kind": "loop"},
        {"num_layers": 4},
        {"hidden_size": 0},
        {"lr_decay_style": "sawtooth"},
        {"mhc_num_residual_streams": 3},  # the kernels have 2, 4 and 8
        {"mhc_num_residual_streams": 0},
        {"micro_batch_size": True},
        {"use_distributed_optimizer": 1},
        {"patches": ["dataset_helpers_prebuilt"]},
        {"patches": ("dataset_helpers_prebuilt", 2)},
        {"gates": (("CPPMEGA_X",),)},
        {"kv_channels": 128.0},
        {"pattern": "DEM"},  # M without sizes
        {"pattern": "DEM", "mamba2": Mamba2(4), "mamba3": Mamba3()},
        {"moe_flex_dispatcher_backend": "hybridep"},
        {"moe_token_dispatcher_type": "flex"},  # DeepEP on one GPU
        {"kv_channels": "128"},
        {"seed": 2**32},
        {"first_dense_layers": -1},
        {"lr": 0.0},
        {"lr": float("inf")},
        {"min_lr": float("nan")},
        {"weight_decay": -0.1},
        {"adam_beta2": 1.0},
        {"mamba3": Mamba3(expand=0)},
        {"mamba3": Mamba3(rope_fraction=0.25)},
        {"mamba3": Mamba3(state_dim=6)},
        {"ngram_hash": NgramHash(orders=(2, 0))},
        {"ngram_hash": NgramHash(heads=4)},  # of 16 tables
        {"dsa_dense_loss_steps": -1},
        {"dsa_dense_loss_steps": 2, "pattern": "*E-/*-"},
    ],
)
def test_contradictions_are_refused(changes: dict[str, object]) -> None:
    refused("recipe-invalid", **changes)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("argument-without-effect", {"recompute_modules": ("mhc",)}),
        ("argument-without-effect", {"dsa_dense_loss_steps": 2}),
        (
            "argument-without-effect",
            {
                "dsa_dense_loss_steps": 2,
                "dsa_indexer_use_sparse_loss": True,
                "dsa_indexer_loss_coeff": 0.0,
            },
        ),
        ("dsa-index-sharing", {"dsa_index_pattern": "SF"}),
        ("dsa-index-sharing", {"dsa_index_pattern": "FSS"}),  # for two DSA layers
        (
            "dsa-index-sharing",
            {"dsa_index_pattern": "FS", "gpus": 2, "pattern": "DE+E|DE", **PIPELINE},
        ),
    ],
)
def test_a_rule_about_arguments_has_its_own_name(name: str, changes: dict[str, object]) -> None:
    refused(name, **changes)


CONTEXT = {"context_parallel_size": 2}
OFFLOADED = ("--fine-grained-activation-offloading", "--offload-modules", "core_attn")


@pytest.mark.parametrize(
    ("changes", "added", "said"),
    [
        (
            {"cuda_graph_impl": "local", "recompute_modules": ("mhc",)},
            (),
            "--cuda-graph-impl local with --recompute-modules mhc",
        ),
        ({"recompute_modules": ("mhc", "mlp")}, (), "--recompute-modules mhc mlp"),
        ({}, ("--fp32-residual-connection",), "--fp32-residual-connection"),
        ({"recompute_modules": ("mhc",)}, (*OFFLOADED, "mlp_norm"), "--offload-modules"),
    ],
)
def test_what_hyper_connections_do_not_support_is_refused(
    changes: dict[str, object], added: tuple[str, ...], said: str
) -> None:
    streams = recipes_index.load("gpt_mhc_h200")
    with pytest.raises(CppmegaError) as caught:
        streams.with_(**changes).plus(*added)
    assert caught.value.name == "unsupported" and said in caught.value.what


@pytest.mark.parametrize(
    ("name", "changes", "added"),
    [
        ("nam56r_h200_slice_mhc", {"gates": (("CPPMEGA_MAMBA_RECOMPUTE", "1"),)}, ()),
        ("gpt_mhc_h200", {}, ("--hidden-dropout", "0.1")),
        ("gpt_mhc_h200", {"precision": "fp8", "fp8_recipe": "tensorwise"}, ()),
        ("gpt_mhc_h200", {"cuda_graph_impl": "local"}, ()),
        ("gpt_mhc_h200", {"cuda_graph_impl": "transformer_engine"}, ()),
        ("gpt_mhc_h200", {}, (*OFFLOADED, "attn_norm")),
        ("gpt_mhc_h200", {"recompute_modules": ("mhc",)}, (*OFFLOADED, "attn_proj")),
        ("gpt_mhc_h200", {}, ("--use-megatron-fsdp",)),
        ("gpt_mhc_h200_4gpu_tp2_pp2", {"pipeline_model_parallel_size": 1, **CONTEXT}, ()),
        ("gpt_mhc_h200_4gpu_tp2_pp2", {"virtual_pipeline_model_parallel_size": 2}, ()),
    ],
)
def test_what_hyper_connections_support_is_accepted(
    name: str, changes: dict[str, object], added: tuple[str, ...]
) -> None:
    assert recipes_index.load(name).with_(**changes).plus(*added).uses_mhc


def test_a_recipe_names_the_dsa_layers_that_share_keys() -> None:
    shared = SLICE.with_(dsa_index_pattern="FS")
    assert shared.indexers == 3 < SLICE.indexers == 4  # with those of two MTP depths
    variable = ("CPPMEGA_DSA_INDEX_PATTERN", "FS")
    assert variable in shared.variables and variable[0] not in dict(SLICE.variables)
    assert variable in render(shared, "0.19.2").environment
    assert ("CPPMEGA_INDEX_CACHE", "1") in shared.wanted_gates and SLICE.wanted_gates == ()
    full = {"dsa_index_pattern": "FF", "gpus": 2, "pattern": "DE+E|DE", **PIPELINE}
    assert SLICE.with_(**full).indexers == 2
    gpt = {"kind": "gpt", "pattern": "", "attention": "dsa", "gpus": 2, **PIPELINE}
    assert SLICE.with_(**gpt, num_layers=4, dsa_index_pattern="FSFS").indexers == 2
    assert "layers 3 are Shared" in (
        refused("dsa-index-sharing", **gpt, num_layers=4, dsa_index_pattern="FSSF").what
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dsa_kernel_backend": "tielang"}, "none, tilelang, cudnn. Did you mean tilelang?"),
        ({"micro_batch_size": "2"}, "micro_batch_size='2' is invalid: expected int, got str."),
        ({"kv_channels": 0}, "expected int >= 1."),
        ({"patches": ["one"]}, "expected tuple, got list."),
        ({"gates": (("CPPMEGA_X",),)}, "expected tuple of length 2, got 1."),
        ({"mamba3": Mamba3(rank=0)}, "mamba3.rank=0 is invalid"),
    ],
)
def test_a_value_of_another_type_says_which_is_expected(
    changes: dict[str, object], said: str
) -> None:
    assert said in refused("recipe-invalid", **changes).what


def test_a_whole_number_stands_for_a_real_one() -> None:
    assert repr(SLICE.with_(lr=1).lr) == "1"


def test_a_gpt_recipe_has_the_layers_it_says() -> None:
    sizes = {"pattern": "", "num_layers": 2, "first_dense_layers": 1}
    gpt = V32.with_(kind="gpt", attention="mla", mtp_num_layers=1, **sizes)
    assert gpt.layout.trunk == "+-+E"
    assert (gpt.layout.mtp, gpt.layout.depths) == ("+E", 1)
    with pytest.raises(CppmegaError, match="a GPT with DSA has MTP depths"):
        gpt.with_(attention="dsa")


def test_the_full_pattern_is_the_one_the_model_is_defined_by() -> None:
    layout = recipes_index.load("nam56r_h200_8gpu_bf16").layout
    places = {letter: [i for i, c in enumerate(layout.trunk, 1) if c == letter] for letter in "D+R"}
    assert places["D"] == [5, 9, 13, 21, 25, 29, 37, 41, 45]
    assert places["+"] == [1, 17, 33, 49]
    assert places["R"] == [12, 24, 36, 48]
    assert len(layout.trunk) == 52
    assert (layout.trunk.count("E"), layout.trunk.count("M")) == (22, 13)


def test_what_a_release_does_not_know_depends_on_the_release() -> None:
    layout = layer_pattern.parse("DE+EM-R/D-")
    assert layer_pattern.unknown_to(layout, (0, 17)) == ["D", "+", "M", "R"]
    assert layer_pattern.unknown_to(layout, (0, 18)) == ["+", "M", "R"]
    assert layer_pattern.unknown_to(layout, (0, 19)) == []
    assert layout.without("D+MR").render() == "EE-/-"


def test_every_shipped_recipe_names_patches_that_exist() -> None:
    pages = {name for name, _ in catalogue.page_files(catalogue.builtin_folder())}
    for name in recipes_index.shipped():
        assert set(recipes_index.load(name).patches) <= pages, name


def test_the_precision_of_a_recipe_is_in_its_name_or_bf16() -> None:
    for name in recipes_index.shipped():
        recipe = recipes_index.load(name)
        if recipe.gpus:
            assert (recipe.precision == "fp8") == name.endswith("fp8"), name


def test_an_unknown_recipe_names_the_nearest_one() -> None:
    with pytest.raises(CppmegaError, match="Did you mean nam56r_h200_slice"):
        recipes_index.load("nam56r_h200_slize")


def test_a_recipe_is_loaded_by_path_and_must_carry_its_file_name(tmp_path: Path) -> None:
    text = (
        "from cppmega.recipe.index import load\n"
        "RECIPE = load('smoke_cpu').with_(name='{name}', train_iters=3)\n"
    )
    own = tmp_path / "mine.py"
    own.write_text(text.format(name="mine"))
    assert recipes_index.load(str(own)).train_iters == 3
    assert not list(tmp_path.glob("__pycache__"))  # the folder may be read-only
    own.write_text(text.format(name="other"))
    with pytest.raises(CppmegaError, match="recipe-broken"):
        recipes_index.load(str(own))
    own.write_text("import nowhere_to_be_found\n")
    with pytest.raises(CppmegaError, match="nowhere_to_be_found"):
        recipes_index.load(str(own))
    own.write_text("raise SystemExit(0)\n")  # `cppmega preflight` ended with status 0
    with pytest.raises(CppmegaError, match="SystemExit"):
        recipes_index.load(str(own))
    (tmp_path / "helper_of_mine.py").write_text("STEPS = 3\n")
    own.write_text("from helper_of_mine import STEPS\n")
    with pytest.raises(CppmegaError) as caught:
        recipes_index.load(str(own))
    assert "helper_of_mine.py" in caught.value.next


def test_words_of_a_command_line_become_values() -> None:
    changed = recipes_index.with_text(
        SLICE, ["micro_batch_size=2", "global_batch_size=4", "dsa_kernel_backend=tilelang", "lr=1"]
    )
    assert (changed.micro_batch_size, changed.dsa_kernel_backend) == (2, "tilelang")
    assert changed.lr == 1


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("micro_batch_size", "bad-assignment"),
        ("micro_batch_size=two", "recipe-invalid"),
        ("lr='high'", "recipe-invalid"),
        ("micro_batch=2", "unknown-field"),
    ],
)
def test_a_bad_word_of_a_command_line_is_refused(word: str, name: str) -> None:
    with pytest.raises(CppmegaError) as caught:
        recipes_index.with_text(SLICE, [word])
    assert caught.value.name == name


def test_the_list_says_what_is_missing_and_what_was_measured(tmp_path: Path) -> None:
    rows = {row["name"]: row for row in json.loads(recipes_list.list_recipes(True))["recipes"]}
    assert set(rows) == set(recipes_index.shipped())
    assert rows["nam56r_h200_8gpu_bf16"]["parameters"] == 5_818_834_554
    assert not any(row["missing"] for row in rows.values())
    older = json.loads(recipes_list.list_recipes(True, "0.18.2"))["recipes"]
    lacks = {row["name"]: [gap["part"] for gap in row["missing"]] for row in older}
    assert lacks["nam56r_h200_slice"] == ["1 layers + (multi-latent attention (MLA))"]
    for date, headline in (("2026-01-01", "old"), ("2026-02-01", "new")):
        result = {"recipe": "nam56r_h200_slice", "date": date, "headline": headline}
        (tmp_path / f"{headline}.json").write_text(json.dumps(result))
    (tmp_path / "torn.json").write_text("{")
    changed = {"recipe": "nam56r_h200_slice", "date": "2026-03-01", "changes": ["lr=1"]}
    (tmp_path / "changed.json").write_text(json.dumps({**changed, "headline": "changed"}))
    found = results.collect(tmp_path)
    last = results.last_result("nam56r_h200_slice", found)
    assert last is not None and (last.headline, last.file) == ("new", "new.json")
    assert results.last_result("smoke_cpu", found) is None
    table = recipes_list.list_recipes()
    assert all(name in table for name in rows)


def test_recipes_are_listed_with_what_was_measured() -> None:
    found = results.measured()
    rows = json.loads(recipes_list.list_recipes(True))["recipes"]
    assert {row["name"] for row in rows if row["last_result"]} == {one.recipe for one in found}


def test_a_loop_without_a_warm_up_begins_at_its_rate() -> None:
    """lr_warmup_iters=0 ended in a division by zero, in the first step of every rank."""
    warm = recipes_index.load("smoke_cpu").with_(lr=0.5, lr_warmup_iters=4)
    assert [learning_rate(warm, step) for step in (1, 2, 4, 9)] == [0.125, 0.25, 0.5, 0.5]
    assert learning_rate(warm.with_(lr_warmup_iters=0), 1) == 0.5


def test_listing_imports_neither_torch_nor_megatron() -> None:
    code = (
        "import sys; from cppmega.cli.recipes_list import list_recipes; list_recipes();"
        "print({'torch', 'megatron', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        (f"hidden_size={10**30}", "expected int <="),
        (f"num_layers={10**18}", "expected int <= 10000"),
        (f"mtp_num_layers={2**62}", "expected int <= 10000"),
        (f"global_batch_size={2**62}", "expected int <= 1048576"),
        ("hidden_size=10**30", "got str"),
        ("hidden_size=-1", "expected int >= 1"),
        ("hidden_size=1.5", "got float"),
        ("hidden_size=nan", "got str"),
        ("hidden_size=", "got str"),
        ("lr=nan", "got str"),
        ("lr=", "got str"),
        ("lr={[]: 1}", "got str"),  # no Python that can be evaluated
        ("lr=" + "-" * 3000 + "1", "got str"),
        ("attention=\udc80", "Unicode"),
        ("hidden_size=" + "9" * 5000, "..."),
    ],
)
def test_a_bad_value_is_a_typed_error(assignment: str, said: str) -> None:
    with pytest.raises(CppmegaError, match="recipe-invalid") as caught:
        recipes_index.with_text(recipes_index.load("smoke_cpu"), [assignment])
    assert said in caught.value.what and len(caught.value.what) < 400


def test_a_number_that_python_does_not_print_is_a_typed_error() -> None:
    with pytest.raises(CppmegaError, match="thousands of digits"):
        SLICE.with_(hidden_size=10**5000)
