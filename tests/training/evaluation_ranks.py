"""Evaluation within Megatron's loop, on forked ranks.

Imported in the process that runs a tree, never by pytest itself.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from cppmega.checkpoints import tracker as checkpoint_tracker
from cppmega.recipe import M2RNN, Mamba3, NgramHash, Recipe, Structure
from cppmega.recipe.run_options import RunOptions
from tests.configurations.settings import Configuration
from tests.recipe.test_arithmetic import BASE
from tests.training import loops
from tests.upstream_patches.forked_ranks import on_ranks
from tests.upstream_patches.optimizer.distributed_optimizer import on_cpu

WHOLE = BASE.with_(
    pattern="DMDREE-/D-/D-",
    dsa_index_pattern="FS",
    dsa_indexer_loss_coeff=0.01,
    dsa_indexer_topk=16,
    num_experts=4,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    mamba3=Mamba3(head_dim=16, state_dim=32),
    m2rnn=M2RNN(5, 3, 3),
    ngram_hash=NgramHash((2, 3), 2, (389, 397, 401, 409), dim=8),
    structure=Structure(bottleneck=6),
    packed_documents=True,
    global_batch_size=2,
    train_iters=6,
    eval_tokens=200,
    lr=1e-3,
)
"""Everything that has a state which an evaluation could move."""
ONE = Configuration()
GIVEN = RunOptions(mock_data=True, save_interval=4)


def run(setting: Configuration, recipe: Recipe, options: RunOptions) -> tuple[str, Any]:
    """Train on this rank; returns the digest of the model, and the random state."""
    with on_cpu():
        loop = loops.Loop(recipe, options)
        loop.train()
        return loop.digest(), torch.random.get_rng_state().tolist()


def trained(
    folder: Path, name: str, recipe: Recipe, setting: Configuration = ONE, **options: Any
) -> tuple[list[Any], dict[int, Any], dict[int, dict[str, float]]]:
    """What the ranks return, and the losses of training and evaluation."""
    file = folder / f"{name}.jsonl"
    answers = on_ranks(folder, setting, run, recipe, replace(GIVEN, metrics=file, **options))
    return answers, loops.losses(file), loops.held_out(file)


@cache
def unbroken(folder: Path) -> tuple[list[Any], dict[int, Any], dict[int, dict[str, float]]]:
    """A run that is evaluated at every third step and saved at the fourth."""
    return trained(folder, "unbroken", WHOLE.with_(eval_interval=3), save=folder / "saved")


def check_training_is_the_same_to_the_bit_and_so_are_the_samples(folder: Path) -> None:
    """Whether it is evaluated or not, and however often."""
    without = trained(folder, "without", WHOLE)
    second = trained(folder, "second", WHOLE.with_(eval_interval=2))
    third = unbroken(folder)
    assert len(without[1]) == 6 and not without[2]
    assert without[:2] == second[:2] == third[:2]
    assert list(second[2]) == [2, 4, 6] and list(third[2]) == [3, 6]
    assert second[2][6] == third[2][6]
    assert second[2][6].keys() == {"lm loss", "mtp_1 loss", "mtp_2 loss"}
    assert second[2][2] != second[2][4] != second[2][6]


def check_a_resumed_run_is_evaluated_on_the_same_samples(folder: Path) -> None:
    """To the bit by one rank, and by two that share experts, or are stages."""
    recipe, saved = WHOLE.with_(eval_interval=3), folder / "saved"
    _, _, found = unbroken(folder)
    assert checkpoint_tracker.newest_step(saved) == 4
    _, again, resumed = trained(folder, "resumed", recipe, load=saved)
    assert list(again) == [5, 6] and resumed == {6: found[6]}
    stages = {"pattern": WHOLE.pattern.replace("DMD", "DMD|"), "pipeline_model_parallel_size": 2}
    same_as_one_rank(
        *(folder, recipe, saved),
        experts=(Configuration(data=2, experts="EP 2"), {"expert_model_parallel_size": 2}),
        stages=(Configuration(pipeline=2), stages),
    )


def check_ranks_that_share_heads_are_evaluated_as_one_rank(folder: Path) -> None:
    """With an M2RNN whose key can be divided between two ranks."""
    recipe, saved = WHOLE.with_(eval_interval=3, m2rnn=M2RNN(6, 3, 3)), folder / "heads"
    trained(folder, "before", recipe, save=saved)
    heads = {"tensor_model_parallel_size": 2}
    same_as_one_rank(folder, recipe, saved, heads=(Configuration(tensor=2), heads))


def check_ranks_that_share_sequences_are_evaluated_as_one_rank(folder: Path) -> None:
    """Where the loss is a mean over all tokens, not over the ranks' means."""
    recipe, saved = WHOLE.with_(eval_interval=3, packed_documents=False), folder / "sequences"
    recipe = recipe.with_(pattern="DMD+REE-/+-/+-").plus("--calculate-per-token-loss")
    trained(folder, "whole", recipe, save=saved)
    parts = {"context_parallel_size": 2}
    layout = Configuration(context=2), parts
    # Of a depth's loss in training, Megatron logs the mean over the ranks of their means.
    same_as_one_rank(folder, recipe, saved, logged=1e-3, parts=layout)


def same_as_one_rank(
    folder: Path,
    recipe: Recipe,
    saved: Path,
    logged: float = 1e-5,
    **layouts: tuple[Configuration, dict[str, Any]],
) -> None:
    """Two ranks resume from a checkpoint as one does, with the same evaluation."""
    two = recipe.plus("--no-load-optim").with_(gpus=2)
    one: dict[str, float] = {}
    steps: dict[int, Any] = {}
    for name, (setting, layout) in {"one": (ONE, {"gpus": 1}), **layouts}.items():
        _, rows, found = trained(folder, name, two.with_(**layout), setting, load=saved)
        one, steps = (found[6], rows) if name == "one" else (one, steps)
        assert found[6] == pytest.approx(one, rel=1e-5) and len(found) == 1, name
        for number, (loss, norm, each) in rows.items():
            assert each == pytest.approx(steps[number][2], rel=logged), name
            assert (loss, norm) == pytest.approx(steps[number][:2], abs=2e-3), name  # as logged
