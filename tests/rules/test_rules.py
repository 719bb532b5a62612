"""Rules with sentences of their own: broken, and held."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cppmega.catalogue import loader as catalogue
from cppmega.rules import RULES, recipes
from cppmega.rules.mhc import HEAD
from cppmega.rules.rule import Rule, Run, errors
from cppmega.sizes import mixers, stated

MAMBA3 = {"CPPMEGA_MAMBA3": stated.text(mixers.Mamba3(groups=4, rank=2))}
MATRIX = {"CPPMEGA_M2RNN": stated.text(mixers.M2RNN(gradient_clipping=None))}
STREAMS = {"enable_mhc_connections": True}


def broken(
    given: dict[str, Any],
    variables: dict[str, str] | None = None,
    saved: dict[str, tuple[int, ...]] | None = None,
) -> list[tuple[str, str]]:
    """The names and the first sentences of the errors of a run."""
    run = Run(SimpleNamespace(**given), variables or {}, saved=saved)
    return [(error.name, error.what) for error in errors(RULES, run)]


@pytest.mark.parametrize(
    ("given", "variables", "said"),
    [
        ({"hidden_size": 80}, MAMBA3, "2 x 80 channels of Mamba-3 cannot be split into heads of"),
        (
            {"hidden_size": 256, "tensor_model_parallel_size": 8},
            MAMBA3,
            "4 groups of Mamba-3 cannot be split over 8",
        ),
        ({"hidden_size": 79}, MATRIX, "A width of 79 is less than an M2RNN key of 64"),
        (
            {"hidden_size": 160, "tensor_model_parallel_size": 4},
            MATRIX,
            "2 heads of M2RNN and a key of 64 cannot be split over 4 tensor-",
        ),
        (STREAMS | {"mhc_num_residual_streams": 0}, {}, "--mhc-num-residual-streams is 0"),
        (STREAMS | {"mhc_sinkhorn_iterations": 0}, {}, "--mhc-sinkhorn-iterations is 0"),
        (STREAMS | {"mhc_init_gating_factor": -0.1}, {}, "--mhc-init-gating-factor is -0.1"),
        (STREAMS | {"mhc_recompute_layer_num": 0}, {}, "--mhc-recompute-layer-num is 0"),
        (
            STREAMS | {"mhc_num_residual_streams": 3, "use_fused_mhc": True},
            {},
            "The fused kernels do not support 3 streams",
        ),
        (
            {"enable_hyper_connections": True, "num_residual_streams": 3, "use_fused_mhc": True},
            {},
            "The fused kernels do not support 3 streams",
        ),
        (
            STREAMS | {"use_fused_mhc": True, "mhc_num_residual_streams": 4, "hidden_size": 60},
            {},
            "The fused kernels do not support 4 streams of 60",
        ),
    ],
)
def test_a_size_without_sense(given: dict[str, Any], variables: Any, said: str) -> None:
    ((name, what),) = broken(given, variables)
    assert name == "arguments-invalid" and what.startswith(said)


def test_sizes_that_fit_break_nothing() -> None:
    assert not broken({"hidden_size": 256, "tensor_model_parallel_size": 2}, MAMBA3)
    assert not broken({"hidden_size": 80, "fp8": "hybrid", "fp8_recipe": "tensorwise"}, MATRIX)
    assert not broken(STREAMS | {"mhc_num_residual_streams": 4, "use_fused_mhc": True})
    assert not broken({"enable_hyper_connections": True, "use_fused_mhc": True})  # as in dev
    assert not broken({})


def test_a_variable_that_cannot_be_read_is_an_error() -> None:
    assert {name for name, _ in broken({}, {"CPPMEGA_MAMBA3": "{"})} == {"sizes-misstated"}


@pytest.mark.parametrize(
    ("saved", "variables", "said"),
    [
        ("decay_softplus", MAMBA3, ""),
        ("decay_heavy_tail", MAMBA3, "compute A by heavy_tail; this run's, by softplus"),
        ("decay_softplus", {}, "by softplus; this run's, by no Mamba-3"),
        ("A_log", MAMBA3, "by no Mamba-3; this run's, by softplus"),
        ("A_log", {}, ""),
    ],
)
def test_checkpoints_with_other_mixers(saved: str, variables: dict[str, str], said: str) -> None:
    found = broken({}, variables, {f"decoder.layers.0.mixer.{saved}": (1,)})
    assert [name for name, _ in found] == ["checkpoint-of-another-model"] * bool(said)
    assert not said or said in found[0][1]


@pytest.mark.parametrize(
    ("given", "saved", "said"),
    [
        ({}, {"layers.0.hyper_connection.phi": (1,), HEAD: (4, 8)}, "with hyper-connections"),
        (STREAMS, {"layers.0.mlp": (1,)}, "with one residual stream"),
        (STREAMS, {"layers.0.hyper_connection.phi": (1,)}, "with streams that end in their mean"),
        (
            STREAMS | {"mhc_num_residual_streams": 2},
            {"layers.0.hyper_connection.phi": (1,), HEAD: (4, 8)},
            "with 4 streams.",
        ),
        (
            STREAMS | {"mhc_num_residual_streams": 4},
            {"layers.0.hyper_connection.phi": (1,), HEAD: (4, 8)},
            "",
        ),
        ({}, {"layers.0.mlp": (1,)}, ""),
    ],
)
def test_checkpoints_with_other_streams(given: Any, saved: Any, said: str) -> None:
    found = broken(given, {}, saved)
    assert [name for name, _ in found] == ["checkpoint-of-another-model"] * bool(said)
    assert not said or said in found[0][1]


@pytest.mark.parametrize(
    ("words", "given", "idle"),
    [
        ("--softmax-type", {"hybrid_layer_pattern": "D-M"}, "--softmax-type"),
        ("--softmax-type", {"hybrid_layer_pattern": "D-*"}, ""),
        ("--window-size", {"experimental_attention_variant": "dsa"}, "--window-size"),
        ("--fp8-recipe --fp8-margin", {}, "--fp8-recipe, --fp8-margin"),
        ("--fp8-recipe", {"fp8": "hybrid"}, ""),
        ("--save-interval", {"save": "there"}, ""),
        ("--moe-router-topk --async-save", {"num_experts": 4}, "--async-save"),
    ],
)
def test_arguments_that_are_not_read(words: str, given: dict[str, Any], idle: str) -> None:
    run = Run(SimpleNamespace(num_layers=4, bf16=True, **given), {}, words=words.split())
    found = [error.what for error in errors(RULES, run) if error.name == "argument-without-effect"]
    assert [what.partition(" has no effect")[0] for what in found] == [idle] * bool(idle)


TILELANG = {
    **{"experimental_attention_variant": "dsa", "dsa_kernel_backend": "tilelang", "bf16": True},
    **{"kv_lora_rank": 128, "qk_pos_emb_head_dim": 64, "num_attention_heads": 32},
    **{"tensor_model_parallel_size": 1, "seq_length": 64, "dsa_indexer_topk": 64, "num_layers": 2},
    **{"dsa_indexer_n_heads": 32, "dsa_indexer_loss_coeff": 0.1},
    "dsa_indexer_use_sparse_loss": True,
}
WIDENED = {"dsa_widths_tilelang": ((192, 128),)}


@pytest.mark.parametrize(
    ("given", "provided", "declines"),
    [
        ({}, WIDENED, []),
        ({}, {}, ["widths of 192 and 128"]),
        ({"deterministic_mode": True}, WIDENED, ["--deterministic-mode"]),
        ({"deterministic_mode": True, "kv_lora_rank": 512}, {}, []),
        ({"fp16": True, "bf16": False}, WIDENED, ["attention in another", "indexer in another"]),
        ({"dsa_indexer_n_heads": 20}, WIDENED, ["gradients of 20 index heads"]),
        ({"dsa_indexer_n_heads": 20, "dsa_indexer_loss_coeff": 0}, WIDENED, []),
        ({"dsa_indexer_use_sparse_loss": False}, WIDENED, ["dense loss"]),
        (
            {"deterministic_mode": True, "dsa_indexer_n_heads": 20},
            {"dsa_sparse_attention": ("fused",), "dsa_dense_indexer_loss": ("fused",)},
            [],
        ),
    ],
)
def test_calls_that_a_backend_declines(
    given: dict[str, Any], provided: dict[str, Any], declines: list[str]
) -> None:
    pages = SimpleNamespace(inside=lambda name: provided.get(name, ()), outside=lambda name: {})
    run = Run(SimpleNamespace(**TILELANG | given), {}, pages=pages)
    found = [error.what for error in errors(RULES, run) if error.name == "dsa-backend-declines"]
    assert len(found) == len(declines)
    assert all(text in what for text, what in zip(declines, found, strict=True))


ALL: list[Rule] = [
    *(*RULES, *recipes.RULES),
    *(rule for page in catalogue.load().values() for rule in page.patch.rules),
]


@pytest.mark.parametrize(
    "rule", ALL, ids=lambda rule: f"{rule.concerns}: {rule.option or rule.what}"
)
def test_a_rule_states_its_sentences(rule: Rule) -> None:
    assert rule.concerns and not (rule.what and rule.option)
    if rule.what or rule.option:  # otherwise what cannot be read is raised by the question
        assert rule.why.endswith((".", "}")) and rule.cure
