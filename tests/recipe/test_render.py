"""Rendered launch lines, parsed and validated by each release's own parser in its own process."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from cppmega.errors import CppmegaError
from cppmega.recipe import Recipe
from cppmega.recipe import index as recipes_index
from cppmega.recipe.render import missing, release_line, render
from cppmega.recipe.run_options import RunOptions
from tests.support import patched, python

pytestmark = pytest.mark.slow

VERSIONS = ("0.17.1", "0.18.2", "0.19.2")
RUN = RunOptions(data=("corpus",))

# Validation looks for a GPU and for Transformer Engine; everything else is the release's own code.
PARSE = """
import json, os, sys, types
from unittest import mock

import torch
from megatron.core.transformer import transformer_config
from megatron.core.tokenizers.utils import build_tokenizer
from megatron.training import arguments
from tests.support import parsed_line, te_stand_ins

te_stand_ins.kernels_of_experts()
parsed_line.build_parser_once()
cases = json.loads(os.environ["CASES"])
os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
out = {}
for name, (gpus, argv) in cases.items():
    os.environ["WORLD_SIZE"] = str(gpus)
    sys.argv = ["train", *argv]
    sys.stdout = open(os.devnull, "w")
    try:
        args = arguments.parse_args()
        patches = [
            mock.patch.object(torch.cuda, "get_device_capability", lambda *a: (9, 0)),
            mock.patch.object(
                torch.cuda, "get_device_properties", lambda *a: types.SimpleNamespace(major=9)
            ),
            mock.patch.object(transformer_config, "is_te_min_version", lambda *a, **k: True),
            mock.patch.object(
                transformer_config,
                "_validate_dsa_kernel_backend_dependencies",
                lambda *a: None,
                create=True,
            ),
        ]
        for patch in patches:
            patch.start()
        arguments.validate_args(args)
        config = arguments.core_transformer_config_from_args(args)
        build_tokenizer.build_tokenizer(args)
        keep = (int, float, str, bool, list, type(None))
        found = {k: v for k, v in vars(args).items() if isinstance(v, keep)}
        found = {k: [str(i) for i in v] if isinstance(v, list) else v for k, v in found.items()}
        out[name] = {"args": found, "config": type(config).__name__}
    except SystemExit:
        out[name] = {"refused": "the parser stopped"}
    except Exception as error:
        out[name] = {"refused": f"{type(error).__name__}: {error}"}
    finally:
        sys.stdout = sys.__stdout__
print("ANSWER" + json.dumps(out))
"""

GRAPHS = recipes_index.load("nam56r_h200_slice").with_(
    cuda_graph_impl="transformer_engine", cuda_graph_modules=("attn", "moe_router")
)
UNFUSED = "--no-rope-fusion"
"""Without Transformer Engine there is no fused kernel for a GPT's RoPE."""
DENSE = Recipe(
    name="dense",
    purpose="grouped-query attention and a sharded head",
    kind="gpt",
    precision="bf16",
    gpus=4,
    num_layers=2,
    hidden_size=64,
    ffn_hidden_size=128,
    num_attention_heads=8,
    num_query_groups=4,
    seq_length=128,
    vocab_size=1000,
    activation="squared_relu",
    tied_embeddings=True,
    tensor_model_parallel_size=2,
    packed_documents=True,
    global_batch_size=2,
    gradient_accumulation_fusion=True,
).plus("--log-params-norm", UNFUSED)
STAGES = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
VIRTUAL = DENSE.with_(
    name="virtual",
    num_layers=8,
    tensor_model_parallel_size=1,
    global_batch_size=4,
    dist_ckpt_optim_fully_reshardable=True,
    ddp_average_in_collective=True,
    **STAGES,
)


def recipes() -> dict[str, Recipe]:
    """Every shipped recipe that Megatron trains, and some that use what those do not."""
    shipped = [recipes_index.load(name) for name in recipes_index.shipped()]
    found = {recipe.name: recipe for recipe in shipped if recipe.kind != "loop"}
    found |= {name: made.plus(UNFUSED) for name, made in found.items() if made.kind == "gpt"}
    full = found["nam56r_small_cut"].with_(name="full_cut", pattern="+EME+EME+EMR/+-/+-")
    found["flex"] = found["nam56r_h200_2gpu_ep2"].with_(
        moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="hybridep"
    )
    found["context"] = full.with_(gpus=2, context_parallel_size=2)
    return {**found, "graphs": GRAPHS, "dense": DENSE, "virtual": VIRTUAL, "full_cut": full}


@cache
def parsed(version: str) -> dict[str, Any]:
    """What a release makes of every recipe, and of one line that was rendered for another."""
    cases = {
        name: (recipe.gpus, render(recipe, version, RUN, 256).argv)
        for name, recipe in recipes().items()
    }
    other = "0.19.2" if version != "0.19.2" else "0.17.1"
    cases["for another release"] = (1, render(GRAPHS, other, RUN, 256).argv)
    # A recipe may ask for `linear` or mHC, or have a letter `R`, known with these pages alone.
    added = ("own_mixers", "mhc_connections") if version == "0.19.2" else ()
    root = patched(version, "cross_entropy_fusion_linear", *added)
    done = python(root, PARSE, env={"CASES": json.dumps(cases)})
    assert "ANSWER" in done.stdout, done.stderr[-2000:]
    answer: dict[str, Any] = json.loads(done.stdout.partition("ANSWER")[2])
    return answer


@pytest.mark.megatron
@pytest.mark.parametrize("version", VERSIONS)
def test_every_recipe_is_accepted_by_the_release_it_is_rendered_for(version: str) -> None:
    answer = parsed(version)
    refused = {name: answer[name].get("refused") for name in recipes()}
    assert not any(refused.values()), refused


@pytest.mark.megatron
@pytest.mark.parametrize("version", VERSIONS)
def test_the_release_reads_what_the_recipe_says(version: str) -> None:
    for name, recipe in recipes().items():
        args = parsed(version)[name]["args"]
        same = (
            *("hidden_size", "ffn_hidden_size", "num_attention_heads", "seq_length", "seed"),
            *("micro_batch_size", "global_batch_size", "train_iters", "lr", "clip_grad"),
            *("tensor_model_parallel_size", "expert_model_parallel_size", "init_method_std"),
            *("pipeline_model_parallel_size", "context_parallel_size"),
            *("use_distributed_optimizer", "overlap_param_gather", "rotary_base"),
            "ddp_average_in_collective",
            *("padded_vocab_size", "dist_ckpt_optim_fully_reshardable"),
        )
        assert {k: args[k] for k in same} == {k: getattr(recipe, k) for k in same}, name
        stages = args["virtual_pipeline_model_parallel_size"] or 1
        assert stages == recipe.virtual_pipeline_model_parallel_size, name
        assert args["layernorm_epsilon"] == recipe.norm_epsilon, name
        assert args["bf16"] and not args["fp16"], name
        assert (args["fp8"] is not None) == (recipe.precision == "fp8"), name
        assert args["check_for_nan_in_loss_and_grad"] is True, name
        assert args["mock_data"] is False and args["data_path"] == ["corpus"], name
        assert (args["attention_dropout"], args["hidden_dropout"]) == (0.0, 0.0), name
        assert args["data_parallel_size"] == recipe.data_parallel_size, name
        fused = recipe.gradient_accumulation_fusion
        assert args["gradient_accumulation_fusion"] is fused, name
        depths = args["mtp_num_layers"] or 0
        left_out = bool(missing(recipe, version))
        assert depths == recipe.layout.depths, name
        if not left_out:
            layers = recipe.num_layers or len(recipe.layout.trunk)
            assert args["num_layers"] == layers, name


@pytest.mark.megatron
@pytest.mark.parametrize("version", VERSIONS)
def test_names_that_changed_are_read_back(version: str) -> None:
    args = parsed(version)["graphs"]["args"]
    modules = args.get("cuda_graph_modules") or args.get("cuda_graph_scope")
    assert [word.rpartition(".")[2] for word in modules] == ["attn", "moe_router"]
    dense = parsed(version)["dense"]["args"]
    assert dense["log_params_norm"] is True  # from `plus`
    assert (dense["num_query_groups"], dense["sequence_parallel"]) == (4, True)
    assert dense["eod_mask_loss"] is True
    assert dense["untie_embeddings_and_output_weights"] is False
    flex = parsed(version)["flex"]["args"]
    assert flex["moe_flex_dispatcher_backend"] == "hybridep"


@pytest.mark.megatron
@pytest.mark.parametrize("version", VERSIONS)
def test_the_fusions_of_experts_are_arguments_of_every_release(version: str) -> None:
    """The config refuses them without Transformer Engine."""
    fused = GRAPHS.with_(moe_permute_fusion=True, moe_router_fusion=True)
    added = set(render(fused, version).argv) - set(render(GRAPHS, version).argv)
    assert added == {"--moe-permute-fusion", "--moe-router-fusion"}
    plain = parsed(version)["graphs"]["args"]
    assert plain["moe_permute_fusion"] is plain["moe_router_fusion"] is False


@pytest.mark.megatron
@pytest.mark.parametrize("version", VERSIONS)
def test_a_line_for_another_release_is_refused_or_read_differently(version: str) -> None:
    """Otherwise the per-release names would not be needed, and these tests could not fail."""
    other = parsed(version)["for another release"]
    if version == "0.17.1":
        assert "refused" in other
    elif version == "0.18.2":
        assert "refused" in other  # 0.19's pattern has a letter it does not know
    else:
        assert other["args"]["vocab_size"] != GRAPHS.vocab_size


def test_what_a_release_lacks_is_left_out_and_said() -> None:
    recipe = recipes_index.load("nam56r_h200_slice")
    assert not render(recipe, "0.19.2").missing
    old = render(recipe, "0.18.2")
    assert [gap.part[:10] for gap in old.missing] == ["1 layers +"]
    assert "0.19 is the first" in old.missing[0].reason
    assert old.argv[old.argv.index("--hybrid-layer-pattern") + 1] == "DEEDE/D-/D-"
    older = render(recipe, "0.17.1").argv
    assert older[older.index("--hybrid-layer-pattern") + 1] == "EEE/-/-"
    assert "--multi-latent-attention" not in older
    gaps = [gap.part for gap in missing(recipes_index.load("dsv32_h200_slice"), "0.18.2")]
    assert gaps == ["DSA kernel backend tilelang"]
    streams = recipe.with_(mhc_num_residual_streams=4)
    assert not missing(streams, "0.19.2")
    assert "hyper-connections (mHC)" in [gap.part for gap in missing(streams, "0.18.2")]
    assert not [word for word in render(streams, "0.18.2").argv if "mhc" in word]


def test_streams_are_rendered_under_the_names_of_0_20() -> None:
    recipe = recipes_index.load("nam56r_h200_slice")
    assert not [word for word in render(recipe, "0.19.2").argv if "mhc" in word]
    blocks = {"recompute_modules": ("mhc",), "mhc_recompute_layer_num": 2}
    argv = render(recipe.with_(mhc_num_residual_streams=4, **blocks), "0.19.2").argv
    assert {"--enable-mhc-connections", "--use-fused-mhc"} <= set(argv)
    options = {"--mhc-num-residual-streams": "4", "--mhc-sinkhorn-iterations": "20"}
    options |= {"--mhc-init-gating-factor": "0.01", "--mhc-recompute-layer-num": "2"}
    for option, value in {**options, "--recompute-modules": "mhc"}.items():
        assert argv[argv.index(option) + 1] == value


def test_the_steps_of_a_dense_loss_are_a_variable_of_the_run() -> None:
    fused = recipes_index.load("nam56r_h200_slice_fused")
    assert "CPPMEGA_DSA_DENSE_LOSS_STEPS" not in dict(render(fused, "0.19.2").environment)
    warmed = render(fused.with_(dsa_dense_loss_steps=100), "0.19.2")
    assert ("CPPMEGA_DSA_DENSE_LOSS_STEPS", "100") in warmed.environment
    assert "--dsa-indexer-use-sparse-loss" in warmed.argv


def test_the_release_candidates_and_local_versions_are_understood() -> None:
    assert release_line("0.17.0rc0") == (0, 17)
    assert release_line("0.19.1+a1b2c3") == (0, 19)
    assert render(GRAPHS, "0.20.0").argv == render(GRAPHS, "0.19.2").argv


def test_a_release_without_a_training_loop_says_that_a_checkout_is_needed() -> None:
    with pytest.raises(CppmegaError) as caught:
        render(GRAPHS, "0.16.1")
    assert caught.value.name == "training-not-in-wheel"
    assert "checkout" in caught.value.next


def test_a_loop_has_no_launch_line() -> None:
    with pytest.raises(CppmegaError, match="recipe-is-a-loop"):
        render(recipes_index.load("smoke_cpu"), "0.19.2")


def test_warm_up_is_always_shorter_than_the_decay() -> None:
    argv = render(GRAPHS.with_(train_iters=20, lr_warmup_iters=100), "0.19.2").argv
    assert argv[argv.index("--lr-decay-iters") + 1] == "101"
