"""The learning rate and weight decay of a resumed run, with both of Megatron's optimizers."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from tests.upstream_patches import one_process

torch = pytest.importorskip("torch")

PAGE = "scheduler_override_at_resume"
SAVED_AT, STEPS = 5, 10


@pytest.mark.megatron
@pytest.mark.parametrize("version", one_process.PAGES[PAGE])
def test_resumed_rates(version: str) -> None:
    one_process.assert_passes(PAGE, version)


def check(stock: one_process.Stock) -> None:
    from megatron.core import optimizer_param_scheduler as patched

    from cppmega.proof import cpu_shims
    from tests.upstream_patches.optimizer import distributed_optimizer as small

    cpu_shims.init_distributed()
    unpatched = stock.module("megatron.core.optimizer_param_scheduler")
    with small.on_cpu():
        for distributed in (False, True):
            saved = small.Run(0, 1e-3, distributed)
            before = scheduler(patched, saved, 1e-3)
            for _ in range(SAVED_AT):
                saved.step(1)
                before.step(1)
            state = saved.optimizer.state_dict(), before.state_dict()

            for module in (patched, unpatched):  # nothing is overridden: the run goes on
                assert resumed(module, distributed, state, 1e-3) == rates(saved)
            override = {"override_opt_param_scheduler": True}
            wanted = [(rate / 100, decay * 2) for rate, decay in rates(saved)]
            got = resumed(patched, distributed, state, 1e-5, wd=0.2, **override)
            assert got == [pytest.approx(pair) for pair in wanted], got
            as_saved = resumed(
                patched, distributed, state, 1e-5, wd=0.2, use_checkpoint_opt_param_scheduler=True
            )
            assert as_saved == rates(saved)
            with pytest.raises(AssertionError, match="do not match"):
                resumed(patched, distributed, state, 1e-5)
            what_stock_does(stock, unpatched, distributed, state, rates(saved))


def what_stock_does(
    stock: one_process.Stock, unpatched: Any, distributed: bool, state: Any, saved: Any
) -> None:
    """Assert that stock keeps the rates of the checkpoint, or finds no group with other rates."""
    from megatron.core.optimizer import distrib_optimizer, optimizer

    names = {"distrib_optimizer": "DistributedOptimizer", "optimizer": "MegatronOptimizer"}
    methods = {
        "distrib_optimizer": "load_state_dict",
        "optimizer": "_filter_and_reorder_param_groups",
    }
    module = distrib_optimizer if distributed else optimizer
    name = module.__name__.rpartition(".")[2]
    original = getattr(stock.module(module.__name__), names[name]).__dict__[methods[name]]
    by_bounds = "max_lr" in optimizer.param_group_identifier_keys
    with mock.patch.object(getattr(module, names[name]), methods[name], original):
        if by_bounds:
            with pytest.raises((KeyError, ValueError)):
                resumed(unpatched, distributed, state, 1e-5, override_opt_param_scheduler=True)
            return
        got = resumed(unpatched, distributed, state, 1e-5, override_opt_param_scheduler=True)
        assert [rate for rate, _ in got] == [rate for rate, _ in saved]


def resumed(
    module: Any, distributed: bool, state: Any, lr: float, wd: float = 0.1, **given: Any
) -> list[tuple[float, float]]:
    """Return rate and weight decay per group of the first step after a run loads the state."""
    from copy import deepcopy

    from tests.upstream_patches.optimizer import distributed_optimizer as small

    run = small.Run(1, lr, distributed)
    new = scheduler(module, run, lr, wd, **given)
    run.optimizer.load_state_dict(deepcopy(state[0]))
    new.load_state_dict(state[1])
    return rates(run)


def rates(run: Any) -> list[tuple[float, float]]:
    return [(group["lr"], group["weight_decay"]) for group in run.optimizer.param_groups]


def scheduler(module: Any, run: Any, lr: float, wd: float = 0.1, **given: Any) -> Any:
    common = {"lr_warmup_steps": 0, "lr_decay_steps": STEPS, "wd_incr_steps": STEPS}
    common |= {"lr_decay_style": "linear", "wd_incr_style": "constant"}
    given = {"use_checkpoint_opt_param_scheduler": False} | given
    return module.OptimizerParamScheduler(
        run.optimizer,
        init_lr=0.0,
        max_lr=lr,
        min_lr=lr / 100,
        start_wd=wd,
        end_wd=wd,
        **common,
        **given,
    )
