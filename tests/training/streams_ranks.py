"""Several residual streams in Megatron's loop: with packed documents and with heads that hold no
logits, on four ranks, killed, and from one layout's checkpoint to the next.

Imported in the process that runs a tree, never by pytest itself.
"""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from megatron.training import global_vars, training

from tests.configurations.settings import Configuration
from tests.recipe.test_arithmetic import BASE, GPT, STREAMS
from tests.training import loops
from tests.training.evaluation_ranks import GIVEN, ONE, run, trained
from tests.upstream_patches.forked_ranks import on_ranks

PACKED = BASE.with_(
    pattern="*-*-/*-/*-", packed_documents=True, train_iters=3, global_batch_size=2, **STREAMS
)
LINEAR = PACKED.with_(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="linear")


def check_streams_packs_and_linear_heads_go_together(folder: Path) -> None:
    """The losses of trunk and depths are those of heads with logits; packs and streams matter."""
    rows = {
        name: trained(folder, name, recipe, ONE)[1]
        for name, recipe in (
            ("logits", PACKED),
            ("linear", LINEAR),
            ("unpacked", LINEAR.with_(packed_documents=False)),
            ("one stream", LINEAR.with_(mhc_num_residual_streams=1)),
        )
    }
    linear = rows.pop("linear")
    for step, (_, norm, losses) in rows.pop("logits").items():
        assert losses == pytest.approx(linear[step][2], rel=1e-5) and len(losses) == 3, step
        assert norm == pytest.approx(linear[step][1], abs=2e-3), step
    for name, other in rows.items():
        assert other[1][2] != pytest.approx(linear[1][2], rel=1e-4), name


GPT_OF_UPSTREAM = GPT.with_(
    **{"mtp_num_layers": 1, "train_iters": 6, "global_batch_size": 2, "lr": 1e-3},
    **{"mhc_init_gating_factor": 0.3, **STREAMS},
)
"""A GPT, which upstream's functional test of mHC trains on four ranks; here with an MTP depth."""
FOUR = Configuration(tensor=2, pipeline=2)
LAYOUT = {"gpus": 4, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
BLOCKS = {"recompute_modules": ("mhc",), "mhc_recompute_layer_num": 1}


def check_four_ranks_of_streams_train_as_one(folder: Path) -> None:
    """TP 2 with sequence parallelism and PP 2 in one model, whose checkpoint one rank loads."""
    saved, of_four = folder / "of one", folder / "of four"
    trained(folder, "before", GPT_OF_UPSTREAM.with_(train_iters=4), save=saved)
    whole = GPT_OF_UPSTREAM.with_(train_iters=8)
    begun = whole.plus("--no-load-optim")
    _, one, _ = trained(folder, "one", begun, load=saved)
    for name, more in {"four, recomputed": BLOCKS, "four": {}}.items():
        layout = begun.with_(**LAYOUT, **more)
        at_six = {"load": saved, "save": of_four / name, "save_interval": 6}
        ranks, four, _ = trained(folder, name, layout, FOUR, **at_six)
        assert_close(four, one, name)
        assert len({digest for digest, _ in ranks}) == 4  # each has a part of the model
    _, back, _ = trained(folder, "back", whole, load=of_four / name)
    assert_close(back, {step: four[step] for step in (7, 8)}, "back to one")


def assert_close(found: dict[int, Any], wanted: dict[int, Any], name: str) -> None:
    """Compare losses and norms of each step, the latter as they are logged."""
    assert found.keys() == wanted.keys() and found, name
    for step, (_, norm, losses) in wanted.items():
        assert found[step][2] == pytest.approx(losses, rel=1e-5), (name, step)
        assert found[step][1] == pytest.approx(norm, abs=2e-3), (name, step)


def check_a_killed_run_of_four_ranks_goes_on_to_the_bit(folder: Path) -> None:
    """All ranks are killed in a step, without warning, after the one that was saved."""
    recipe, saved = GPT_OF_UPSTREAM.with_(**LAYOUT), folder / "saved"
    unbroken, whole, _ = trained(folder, "unbroken", recipe, FOUR)

    def killed(setting: Configuration) -> None:
        training_step = training.train_step

        def step(*given: Any, **named: Any) -> Any:
            if global_vars.get_args().curr_iteration == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            return training_step(*given, **named)

        training.train_step = step
        file = folder / "killed.jsonl"
        run(setting, recipe, replace(GIVEN, metrics=file, save=saved))

    with pytest.raises(FileNotFoundError):  # no rank could write an error, or an answer
        on_ranks(folder, FOUR, killed)
    assert list(loops.losses(folder / "killed.jsonl")) == [1, 2, 3, 4, 5]
    resumed, rest, _ = trained(folder, "resumed", recipe, FOUR, load=saved)
    assert rest == {step: whole[step] for step in (5, 6)}
    assert [digest for digest, _ in resumed] == [digest for digest, _ in unbroken]
