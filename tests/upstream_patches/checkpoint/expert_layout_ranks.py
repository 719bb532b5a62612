"""Optimizer states loaded at another expert-parallel size, in Megatron's loop on forked ranks.

Imported in the process that runs a tree, never by pytest itself.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.training import checkpointing, training

from cppmega.recipe import Recipe
from cppmega.recipe.run_options import RunOptions
from tests.configurations.settings import Configuration
from tests.recipe.test_arithmetic import BASE
from tests.training import loops
from tests.training.evaluation_ranks import run
from tests.upstream_patches.forked_ranks import on_ranks
from tests.upstream_patches.optimizer.distributed_optimizer import on_cpu

RECIPE = BASE.with_(
    pattern="*E-/*E",
    num_experts=4,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    dist_ckpt_optim_fully_reshardable=True,
    global_batch_size=4,
    train_iters=4,
    lr=1e-3,
    lr_decay_style="linear",
)
STAGES = {"pattern": "*E|-/*E", "pipeline_model_parallel_size": 2}
LAYOUTS = {
    "one rank": (Configuration(), RECIPE),
    "EP 1": (Configuration(data=2), RECIPE.with_(gpus=2)),
    "PP 2": (Configuration(pipeline=2), RECIPE.with_(gpus=2, **STAGES)),
    "EP 2": (
        Configuration(data=2, experts="EP 2"),
        RECIPE.with_(gpus=2, expert_model_parallel_size=2),
    ),
    "EP 2, twice": (
        Configuration(data=4, experts="EP 2"),
        RECIPE.with_(gpus=4, expert_model_parallel_size=2),
    ),
}
"""In the last one, as with EP 4 on eight GPUs, two ranks have the same experts."""
GIVEN = RunOptions(mock_data=True, save_interval=2)


def trained(folder: Path, name: str, layout: str, **options: Any) -> tuple[Any, dict[int, Any]]:
    """Digests of the ranks, and the logged losses of each step."""
    setting, recipe = LAYOUTS[layout]
    file = folder / f"{name}.jsonl"
    answers = on_ranks(folder, setting, run, recipe, replace(GIVEN, metrics=file, **options))
    return [digest for digest, _ in answers], loops.losses(file)


def resaved(setting: Configuration, recipe: Recipe, options: RunOptions) -> int:
    """Load on this rank and save again; returns the number of optimizers."""
    with on_cpu(), loops._without_cuda():
        loop = loops.Loop(recipe, options)
        scheduler = training.get_optimizer_param_scheduler(loop.optimizer)
        given = [loop.ddp], loop.optimizer, scheduler
        loops.get_cuda_rng_tracker().set_states({"model-parallel-rng": torch.get_rng_state()})
        step, _ = checkpointing.load_checkpoint(*given)
        checkpointing.save_checkpoint(step, *given, 0)
        return len(loop.optimizer.chained_optimizers)


def whole(setting: Configuration, folder: Path) -> tuple[dict[str, Any], Any]:
    """Every tensor of a checkpoint by name, and the parameter groups of each optimizer."""
    tensors = dist_checkpointing.load_plain_tensors(str(folder))
    saved = dist_checkpointing.load_common_state_dict(str(folder))["optimizer"]
    parts = [saved] if "optimizer" in saved else [saved[at] for at in sorted(saved)]
    return tensors, [part["optimizer"]["param_groups"] for part in parts]


def check_states_are_the_same_at_every_expert_parallel_size(folder: Path) -> None:
    """There and back: weights, masters, moments, steps, rates, and the training steps after it."""
    for first, second in (("one rank", "EP 2, twice"), ("EP 2", "PP 2")):
        name = f"{first} to {second}"
        there, moved, back = (folder / f"{name}, {n}" for n in (1, 2, 3))
        for made in (there, moved, back):
            made.mkdir()
        unbroken = trained(folder, f"{name}, unbroken", first, save=there)
        _keep_step_2(there)
        found = []
        for layout, load, save in ((second, there, moved), (first, moved, back)):
            setting, recipe = LAYOUTS[layout]
            found += on_ranks(
                folder, setting, resaved, recipe, replace(GIVEN, load=load, save=save)
            )
        assert set(found) == {1, 2}, found
        one = LAYOUTS["one rank"][0]
        ((saved, groups),) = on_ranks(folder, one, whole, there / "iter_0000002")
        for copy in (moved, back):
            ((tensors, other),) = on_ranks(folder, one, whole, copy / "iter_0000002")
            assert tensors.keys() == saved.keys(), name
            for key, tensor in saved.items():
                if isinstance(tensor, torch.Tensor):
                    assert torch.equal(tensors[key], tensor), (name, key)
            _assert_same_groups(groups, other)
        assert len([key for key in saved if key.startswith("optimizer.state.exp_avg_sq.")]) > 10
        assert len([key for key in saved if ".experts." in key and "exp_avg." in key]) > 3

        _, steps = trained(folder, name, second, load=there)
        assert list(steps) == [3, 4]
        for number, (loss, norm, each) in steps.items():
            before = unbroken[1][number]
            assert each == pytest.approx(before[2], rel=1e-5), (name, number)
            assert (loss, norm) == pytest.approx(before[:2], abs=2e-3), (name, number)  # as logged
        again = trained(folder, f"{name} and back", first, load=back)
        assert again == trained(folder, f"{first} again", first, load=there)
        assert again[0] == unbroken[0]


def check_rates_may_change_with_the_layout(folder: Path) -> None:
    """With `--override-opt_param-scheduler`, which every recipe sets: other groups and bounds."""
    there = folder / "rates"
    there.mkdir()
    trained(folder, "rates", "EP 1", save=there)
    _keep_step_2(there)
    changed = {
        layout: (setting, recipe.with_(lr=5e-4, min_lr=1e-4))
        for layout, (setting, recipe) in LAYOUTS.items()
    }
    with mock.patch.dict(LAYOUTS, changed):
        found = [trained(folder, f"rates {to}", to, load=there)[1] for to in ("EP 1", "EP 2")]
    _, same = trained(folder, "rates kept", "EP 1", load=there)
    for number in (3, 4):
        assert found[1][number][2] == pytest.approx(found[0][number][2], rel=1e-5), number
    assert found[0][4][2] != pytest.approx(same[4][2], rel=1e-5)


def _keep_step_2(folder: Path) -> None:
    """Make step 2 the newest checkpoint of a folder that also holds step 4."""
    (folder / "latest_checkpointed_iteration.txt").write_text("2")


def _assert_same_groups(one: Any, other: Any) -> None:
    """Compare parameter groups of two layouts, one of which has separate groups of experts."""
    names = ("wd_mult", "weight_decay", "lr", "max_lr", "step")
    settings = [
        {tuple(group[name] for name in names) for part in parts for group in part}
        for parts in (one, other)
    ]
    assert settings[0] == settings[1] and len(settings[0]) == 2, settings
    assert {step for *_, step in settings[0]} == {2}
    flags = [{group["is_expert_parallel"] for group in part} for part in other]
    assert flags == [{False}, {True}][: len(other)], flags
