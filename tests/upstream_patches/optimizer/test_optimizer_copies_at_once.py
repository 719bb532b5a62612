"""The distributed optimizer takes the steps of stock, with few calls where stock has hundreds."""

from __future__ import annotations

import pytest

from tests.upstream_patches import one_process

torch = pytest.importorskip("torch")

PAGE = "optimizer_copies_at_once"
METHODS = ("_copy_model_grads_to_main_grads", "_copy_main_params_to_model_params")


@pytest.mark.megatron
@pytest.mark.parametrize("version", one_process.PAGES[PAGE])
def test_steps(version: str) -> None:
    one_process.assert_passes(PAGE, version)


def check(stock: one_process.Stock) -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from cppmega.proof import cpu_shims, operations
    from tests.upstream_patches.optimizer import distributed_optimizer as small

    cpu_shims.init_distributed()
    unpatched = stock.module("megatron.core.optimizer.distrib_optimizer").DistributedOptimizer
    with small.on_cpu():
        for buckets in (None, 60):
            ours, theirs = (small.Run(3, lr=0.1, buckets=buckets) for _ in range(2))
            for method in METHODS:
                bound = getattr(unpatched, method).__get__(theirs.inner)
                setattr(theirs.inner, method, bound)
            for step in range(4):
                for run in (ours, theirs):
                    run.step(step)
                small.assert_equal(ours, theirs)
            assert len(list(ours.model.parameters())) == 8
            with operations.counted() as calls:
                DistributedOptimizer._copy_model_grads_to_main_grads(ours.inner)
                DistributedOptimizer._copy_main_params_to_model_params(ours.inner)
            assert calls["_foreach_copy_"] == 1 and calls["copy_"] == calls["view"] == 0, calls
