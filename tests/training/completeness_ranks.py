"""Parts that are cut out of a model behind the recipe's back, on forked ranks.

Imported in the process that runs a tree, never by pytest itself.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from cppmega.errors import CppmegaError
from cppmega.features.mixers import m2rnn
from cppmega.recipe import Recipe
from cppmega.recipe.run_options import RunOptions
from cppmega.runs import metrics
from cppmega.training import completeness, step
from tests.configurations.settings import Configuration
from tests.training import loops
from tests.training.evaluation_ranks import ONE, WHOLE
from tests.upstream_patches.forked_ranks import on_ranks
from tests.upstream_patches.optimizer.distributed_optimizer import on_cpu

STEPS = 4
RECIPE = WHOLE.with_(train_iters=STEPS)
STAGES = {"pattern": WHOLE.pattern.replace("DMD", "DMD|"), "pipeline_model_parallel_size": 2}
GIVEN = RunOptions(mock_data=True)


def trained(
    setting: Configuration,
    recipe: Recipe,
    spoil: Callable[[Any], None] = lambda model: None,
    options: RunOptions = GIVEN,
) -> str:
    """Train on this rank; returns the error that ended it."""
    with on_cpu(), mock.patch.object(completeness, "STEPS", STEPS):
        loop = loops.Loop(recipe, options)
        spoil(loop.model)
        try:
            loop.train()
        except CppmegaError as error:
            return f"{error.name}: {error.what}"
    return "trained" if gc.get_freeze_count() else "trained, and every object is examined again"


def check_a_whole_model_trains(folder: Path) -> None:
    """On one rank, and on two stages, of which the second logs the memory of the first."""
    for setting, recipe in (
        (ONE, RECIPE),
        (Configuration(pipeline=2), RECIPE.with_(gpus=2, **STAGES)),
    ):
        options = RunOptions(mock_data=True, metrics=folder / f"{setting.ranks}.jsonl")
        answers = on_ranks(folder, setting, trained, recipe, lambda model: None, options)
        assert set(answers) == {"trained"}, setting.name
        assert options.metrics is not None
        peaks = [row.peak_gib for row in metrics.steps(options.metrics)]
        assert peaks == [float(setting.ranks)] * STEPS, setting.name


def check_gradients_that_are_added_in_products_are_the_same(folder: Path) -> None:
    """Of every layer that has such a product, over two micro-batches a step."""
    found = {}
    for fused in (False, True):
        file = folder / f"{fused}.jsonl"
        recipe = RECIPE.with_(gradient_accumulation_fusion=fused, global_batch_size=4)
        options = RunOptions(mock_data=True, metrics=file)
        assert on_ranks(folder, ONE, trained, recipe, lambda model: None, options) == ["trained"]
        found[fused] = loops.losses(file)
    assert len(found[True]) == STEPS
    for number, (loss, norm, losses) in found[False].items():
        fused_loss, fused_norm, fused_losses = found[True][number]
        assert fused_loss == pytest.approx(loss, rel=2e-5)
        assert fused_norm == pytest.approx(norm, rel=2e-3)
        assert fused_losses == pytest.approx(losses, rel=2e-4)


def check_a_model_of_other_sizes_does_not_take_a_step(folder: Path) -> None:
    """Megatron takes the last of two arguments."""
    for argument, value, part in (
        ("--num-experts", "2", "experts: "),
        ("--hybrid-layer-pattern", "DMDREE-/D-", "MTP: "),
    ):
        (said,) = on_ranks(folder, ONE, trained, RECIPE.plus(argument, value))
        assert said.startswith("model-differs-from-recipe") and part in said, said


def without_experts(model: Any, first: int = 2) -> None:
    """Let the router of the last layer send nothing to half of its experts, or from `first` on."""
    for name, module in model.named_modules():
        if name.endswith("layers.5.mlp.router"):
            module.expert_bias[first:] = -100.0  # the next update moves it by a thousandth


def check_the_load_of_experts_is_logged(folder: Path) -> None:
    """Of every step alone, by layer."""
    file = folder / "metrics.jsonl"
    options = RunOptions(mock_data=True, metrics=file)
    on_ranks(folder, ONE, trained, RECIPE, without_experts, options)
    rows = metrics.steps(file)
    assert len(rows) == STEPS - 1  # after the last one, the experts without a token are named
    for row in rows:
        assert row.expert_load is not None
        (least, most), uneven = row.expert_load
        assert 0.0 <= least < 1.0 < most
        assert uneven == (0.0, RECIPE.num_experts / RECIPE.moe_router_topk)


def check_what_no_loss_reaches_is_named(folder: Path) -> None:
    """Experts that no token is sent to, on one of two ranks, and depths whose loss is nothing."""
    shared = RECIPE.with_(gpus=2, expert_model_parallel_size=2)
    said = on_ranks(folder, Configuration(data=2, experts="EP 2"), trained, shared, without_experts)
    assert len(said) == 2 and said[0] == said[1]
    assert said[0].startswith("part-without-gradient: 4 parameters"), said
    assert "layers.5.mlp.experts" in said[0] and "expert rank 1" in said[0]
    assert "expert rank 0" not in said[0]
    assert on_ranks(folder, ONE, trained, RECIPE, partial(without_experts, first=3)) == ["trained"]
    (lost,) = on_ranks(folder, ONE, trained, RECIPE.plus("--mtp-loss-scaling-factor", "0.0"))
    assert lost.startswith("part-without-gradient") and "mtp.layers.0" in lost, lost


def check_a_module_that_is_read_without_a_call_is_named(folder: Path) -> None:
    """By two replicas that gather parameters during the forward pass, and by no others."""
    setting, gathers = Configuration(data=2), {"overlap_param_gather": True}
    plain = RECIPE.with_(gpus=2, overlap_grad_reduce=True)
    overlapped = plain.with_(**gathers)
    assert on_ranks(folder, setting, trained, overlapped) == ["trained"] * 2
    assert on_ranks(folder, setting, trained, plain, without_a_call) == ["trained"] * 2
    for said in on_ranks(folder, setting, trained, overlapped, without_a_call):
        assert said.startswith("module-not-called: The parameters of 2 modules"), said
        mixer = "decoder.layers.3.mixer"
        assert said.endswith(f"no call: {mixer}.conv1d, {mixer}.norm."), said


def without_a_call(model: Any) -> None:
    """Let M2RNN, in the fourth layer, not wait for its convolution and norm."""
    vars(m2rnn)["arrived"] = lambda module: module


def check_structure_that_is_the_same_everywhere_is_named(folder: Path) -> None:
    """As it is where zeros are fed in its place."""
    read = step.next_batch

    def plain(*given: Any) -> Any:
        batch = read(*given)
        torch.nn.init.zeros_(batch.structure_kinds)
        return batch

    with mock.patch.object(step, "next_batch", plain):
        (said,) = on_ranks(folder, ONE, trained, RECIPE)
    assert said.startswith("part-without-gradient: 1 parameters"), said
    assert "embedding.input_embeddings.structure.kinds" in said
