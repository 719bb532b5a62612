"""Models with hyper-connections whose sequences are split over ranks, against one rank.

Their attention gathers the keys of the other parts, and their Mamba layers exchange heads for
tokens. Imported in the process that runs a tree, never by pytest itself.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core.transformer import multi_token_prediction as mtp

from cppmega.features.mhc import options
from tests.configurations import models, training
from tests.configurations.settings import Configuration
from tests.upstream_patches.forked_ranks import on_ranks, without_dropout
from tests.upstream_patches.optimizer.distributed_optimizer import on_cpu

STREAMS = {
    **{"enable_mhc_connections": True, "mhc_num_residual_streams": 2},
    **{"mhc_init_gating_factor": 0.3, "mhc_sinkhorn_iterations": 4},
}
RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["mhc"]}
CASES = (
    (Configuration(mtp=1), {}),
    (Configuration(model="hybrid", mtp=1, packing="packed"), RECOMPUTED),
)
"""A model on one rank, and what else its parts on two ranks do."""


class Run(training.Run):
    """A model in fp32 with streams."""

    def __init__(self, setting: Configuration, **more: Any) -> None:
        def configured(setting: Configuration) -> Any:
            made = without_dropout(setting)
            vars(made).update(STREAMS, **more)
            options.check(made)
            return made

        with mock.patch.object(models, "configured", configured):
            super().__init__(setting, seed=1)

    def _run(self, *given: Any, **named: Any) -> list[float]:
        """Run the schedule with depths whose loss is a sum over a fixed number of tokens.

        Megatron divides by the tokens of the rank, of which parts of a sequence have unequally
        many, so that its depths learn otherwise in parts, whatever the model.
        """
        roll = mtp.roll_tensor

        def counted(*given: Any, **named: Any) -> Any:
            rolled, _ = roll(*given, **named)
            return rolled, torch.tensor(rolled.numel())

        with mock.patch.object(mtp, "roll_tensor", counted):
            return super()._run(*given, **named)


def trained(
    setting: Configuration, more: Any, first: int, load: Path | None, save: Path | None
) -> tuple[list[list[float]], dict[str, Any]]:
    """The losses of three steps, with a checkpoint before the last, and the gradients of one."""
    with on_cpu():
        run = Run(setting, **more)
        if load is not None:
            run.load(load)
        rows = [run.step(first)]
        gradients = {name: p.main_grad.clone() for name, p in run.model.named_parameters()}
        rows.append(run.step(first + 1))
        if save is not None:
            if torch.distributed.get_rank() == 0:
                save.mkdir()
            torch.distributed.barrier()
            run.save(save)
        rows.append(run.step(first + 2))
        return [_whole(row["losses"]) for row in rows], gradients


def _whole(losses: list[float]) -> list[float]:
    """The losses of complete sequences, on every rank."""
    found = torch.zeros(training.MICRO_BATCHES, dtype=torch.float64)
    if losses:
        found += torch.tensor(losses, dtype=torch.float64)
    torch.distributed.all_reduce(found)
    return list(found.tolist())


def check_parts_of_sequences_train_as_one_rank(folder: Path) -> None:
    """From one checkpoint: losses, all gradients, and back into the model of one rank."""
    for number, (alone, more) in enumerate(CASES):
        saved, ended = folder / f"saved{number}", folder / f"ended{number}"
        on_ranks(folder, alone, trained, {}, 1, None, saved)
        ((wanted, gradients),) = on_ranks(folder, alone, trained, {}, 3, saved, None)
        layout = replace(alone, context=2)
        ranks = on_ranks(folder, layout, trained, more, 3, saved, ended)
        ((back, _),) = on_ranks(folder, alone, trained, {}, 5, ended, None)
        for losses, of_rank in ranks:
            torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=0, msg=layout.name)
            torch.testing.assert_close(losses[2], back[0], rtol=1e-5, atol=0, msg=layout.name)
            assert any("hyper_connection" in name for name in of_rank)
            for name, found in of_rank.items():
                # In the first site, whose streams are equal, some are rounding errors.
                far = (found - gradients[name]).abs().max()
                assert far < 2e-4 * gradients[name].abs().max() + 1e-11, (layout.name, name)
