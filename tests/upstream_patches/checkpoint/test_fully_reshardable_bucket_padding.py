"""Fully reshardable checkpoints of a model with several buckets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cppmega.catalogue import loader as catalogue
from tests.upstream_patches import one_process

torch = pytest.importorskip("torch")

PAGE = "fully_reshardable_bucket_padding"
METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


@pytest.mark.megatron
@pytest.mark.parametrize("version", one_process.PAGES[PAGE])
def test_saved_state(version: str) -> None:
    one_process.assert_passes(PAGE, version)


def check(stock: one_process.Stock) -> None:
    from megatron.core.optimizer import distrib_optimizer as patched

    from cppmega.proof import cpu_shims
    from tests.upstream_patches.optimizer import distributed_optimizer as small

    cpu_shims.init_distributed()
    unpatched = stock.module("megatron.core.optimizer.distrib_optimizer")
    with small.on_cpu():
        trained = small.Run(0, lr=0.1, buckets=60)
        assert len(trained.ddp.buffers[0].buckets) > 2
        trained.step(1)
        assert wrong(trained, saved(patched, trained)) == []
        assert len(wrong(trained, saved(unpatched, trained))) == 6  # of 8
        a_resumed_run_is_the_run(patched, unpatched, trained)
        one_bucket = small.Run(0, lr=0.1)
        one_bucket.step(1)
        for module in (patched, unpatched):
            assert wrong(one_bucket, saved(module, one_bucket)) == []


def a_resumed_run_is_the_run(patched: Any, unpatched: Any, trained: Any) -> None:
    """Assert that states return to their own parameters: the next step is the same."""
    from tests.upstream_patches.optimizer import distributed_optimizer as small

    modules = {"patched": patched, "stock": unpatched}
    states = {name: saved(module, trained) for name, module in modules.items()}
    weights = {name: p.detach().clone() for name, p in trained.model.named_parameters()}
    trained.step(2)
    for name, state in states.items():
        resumed = small.Run(7, lr=0.1, buckets=60)
        resumed.step(9)  # its states exist, and are others
        with torch.no_grad():
            for key, p in resumed.model.named_parameters():
                p.copy_(weights[key])
        tensors = {at: {key: v.data for key, v in one.items()} for at, one in state.items()}
        resumed.inner.load_parameter_state_from_fully_reshardable(tensors)
        resumed.step(2)
        same = [
            torch.equal(p, q)
            for p, q in zip(resumed.model.parameters(), trained.model.parameters(), strict=True)
        ]
        assert all(same) is (name == "patched"), (name, same)


def saved(module: Any, run: Any) -> dict[int, Any]:
    """Return what the method of a module writes for the same optimizer."""
    method = module.DistributedOptimizer.sharded_param_state_fully_reshardable
    state: dict[int, Any] = method(run.inner, run.sharded(), metadata=METADATA)
    return state


def wrong(run: Any, state: dict[int, Any]) -> list[str]:
    """Return the parameters that have elements of another one in any state."""
    owned = run.states()
    found = set()
    for tensors in state.values():
        for key, tensor in tensors.items():
            name = tensor.key.removeprefix(f"optimizer.state.{key}.")
            if not torch.equal(tensor.data, owned[name][key]):
                found.add(name)
    return sorted(found)


@pytest.mark.parametrize(
    ("arguments", "reached"),
    [
        ({"use_distributed_optimizer": True, "dist_ckpt_optim_fully_reshardable": True}, True),
        ({"use_distributed_optimizer": True}, False),
        ({"dist_ckpt_optim_fully_reshardable": True}, False),
        (
            {
                "use_distributed_optimizer": True,
                "dist_ckpt_optim_fully_reshardable": True,
                "no_save_optim": True,
            },
            False,
        ),
    ],
)
def test_when_a_run_must_reach_it(arguments: dict[str, object], reached: bool) -> None:
    page = catalogue.load()[PAGE]
    assert page.patch.when is not None
    assert page.patch.when(SimpleNamespace(**arguments)) is reached
