"""Cuts of public models: as large as published when complete, and trained by stock Megatron."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from benchmarks import models
from benchmarks.harness.runs import STARTS
from cppmega.catalogue import loader as catalogue
from cppmega.overlay.wanted import wanted_patches
from cppmega.recipe import Mamba2, Recipe
from cppmega.recipe import index as recipes_index
from cppmega.recipe.arithmetic import megatron_flops, parameters, routed_parameters
from cppmega.recipe.memory import estimate
from cppmega.recipe.render import render
from tests.recipe.test_arithmetic import BASE, BUILD, answer
from tests.recipe.test_render import PARSE, RUN, UNFUSED
from tests.support import pristine, python


@dataclass(frozen=True)
class Model:
    """A published model: what its cut left out, and its parameters in billions."""

    complete: dict[str, Any]
    total: float
    active: float | None = None
    """Those that a token meets."""


BIAS = "--moe-router-enable-expert-bias"
NEMOTRON_H = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
MODELS = {
    "llama3_8b_h100_cut": Model({"num_layers": 32}, 8.03),
    "qwen3_30b_a3b_h100_cut": Model({"num_layers": 48}, 30.5, 3.3),
    "deepseek_v3_h100_cut": Model(
        {"num_layers": 61, "first_dense_layers": 3, "num_experts": 256}, 671, 37
    ),
    "dsv32_h100_cut": Model(
        {"pattern": "D-" * 3 + "DE" * 58 + "/DE", "num_experts": 256},
        # DeepSeek-V3's, and the 61 indexers of 13.96 million.
        *(671.85, 38.4),
    ),
    "nemotron_h_h100_cut": Model({"pattern": NEMOTRON_H}, 8.1),
}


def active(recipe: Recipe) -> int:
    """Parameters of the trunk, but for the experts that a token is not routed to."""
    idle = 1 - recipe.moe_router_topk / recipe.num_experts if recipe.num_experts else 0.0
    routed = routed_parameters(recipe) * recipe.layout.trunk.count("E")
    return round(parameters(recipe).trunk - routed * idle)


@pytest.mark.parametrize("name", MODELS)
def test_the_complete_model_has_the_published_parameters(name: str) -> None:
    model, cut = MODELS[name], recipes_index.load(name)
    assert set(model.complete) <= {"num_layers", "first_dense_layers", "num_experts", "pattern"}
    complete = cut.with_(**model.complete)
    assert parameters(complete).trunk / 1e9 == pytest.approx(model.total, rel=0.01)
    found = active(complete) / 1e9
    assert found == pytest.approx(model.active or model.total, rel=0.02)


@pytest.mark.parametrize("name", MODELS)
def test_a_cut_fits_one_h100_without_recomputation(name: str) -> None:
    cut = recipes_index.load(name)
    assert (cut.gpus, cut.micro_batch_size, cut.recompute_modules) == (1, 1, ())
    for batch in (1, 2):
        larger = cut.with_(micro_batch_size=batch, cross_entropy_fusion_impl="linear")
        assert estimate(larger, attends=True).gib < 78
    assert estimate(cut, attends=True).gib < 72


def test_stock_needs_no_page_and_accepts_every_argument() -> None:
    pages, cases = catalogue.load(), {}
    for name in MODELS:
        own = models.MODELS[name]
        stock = recipes_index.with_text(recipes_index.load(name), own.stock).plus(*own.arguments)
        assert {*wanted_patches(stock, pages)} <= {*STARTS}
        assert not stock.variables
        cases[name] = 1, render(stock.plus(UNFUSED), "0.19.2", RUN, 256).argv
    done = python(pristine("0.19.2"), PARSE, env={"CASES": json.dumps(cases)})
    assert "ANSWER" in done.stdout, done.stderr[-2000:]
    found = json.loads(done.stdout.partition("ANSWER")[2])
    for name in MODELS:
        assert "refused" not in found[name], found[name]
        args, cut = found[name]["args"], recipes_index.load(name)
        assert args["rotary_base"] == cut.rotary_base
        assert args["moe_router_enable_expert_bias"] is (BIAS in models.MODELS[name].arguments)
        assert args["num_query_groups"] == (cut.num_query_groups or 1)
    assert found["nemotron_h_h100_cut"]["args"]["mamba_num_heads"] == 128
    assert found["dsv32_h100_cut"]["args"]["dsa_kernel_backend"] == "tilelang"


MAMBA_SSM = """
import torch
from cppmega.proof import stand_ins

einops = stand_ins.module("einops")
einops.rearrange = einops.repeat = None
norm = stand_ins.module("mamba_ssm.ops.triton.layernorm_gated")

class RMSNorm(torch.nn.Module):
    def __init__(self, width, dtype, **ignored):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width, dtype=dtype))

norm.RMSNorm = RMSNorm
scan = stand_ins.module("mamba_ssm.ops.triton.ssd_combined")
scan.mamba_chunk_scan_combined = scan.mamba_split_conv1d_scan_combined = lambda: None
"""


@pytest.mark.megatron
def test_a_model_of_mamba_2_layers_counts_as_megatron_builds_it() -> None:
    sizes = Mamba2(heads=6, head_dim=16, state_dim=32, groups=2)
    cases = {"Mamba-2": (BASE.with_(pattern="MM-/M-", mamba2=sizes), False)}
    built = answer(pristine("0.19.2"), MAMBA_SSM + BUILD, cases)["Mamba-2"]
    assert parameters(cases["Mamba-2"][0]).total == built["parameters"]
    assert megatron_flops(cases["Mamba-2"][0]) == pytest.approx(built["megatron"], rel=1e-12)
