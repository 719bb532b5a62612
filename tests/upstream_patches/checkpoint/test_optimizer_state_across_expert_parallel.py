"""Optimizer states loaded by a different number of optimizers than saved them."""

from __future__ import annotations

import contextlib
import queue
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from cppmega.catalogue import loader as catalogue
from cppmega.overlay.wanted import wanted_patches
from cppmega.recipe import index as recipes_index
from tests.support import in_a_tree, patched
from tests.support.rules import broken
from tests.upstream_patches import one_process

torch = pytest.importorskip("torch")

PAGE = "optimizer_state_across_expert_parallel"
METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
CHECKS = (
    "check_states_are_the_same_at_every_expert_parallel_size",
    "check_rates_may_change_with_the_layout",
)
RATE = 0.03


@pytest.mark.megatron
@pytest.mark.parametrize("version", one_process.PAGES[PAGE])
def test_loaded_state(version: str) -> None:
    one_process.assert_passes(PAGE, version)


@cache
def answers() -> Any:
    """Results of the functions of `expert_layout_ranks`; None for a check that passes."""
    pages = (
        *("float16_keep_fp32", "hybrid_mtp_padding_mask", "fully_reshardable_bucket_padding"),
        *("own_mixers", "scheduler_override_at_resume", "mtp_roll_packed_sequences", PAGE),
        "log_second_line",
    )
    tree = patched("0.19.2", *pages)
    return in_a_tree.kept(
        *("expert-layouts", tree, "upstream_patches.checkpoint.expert_layout_ranks", CHECKS),
        before=in_a_tree.BEFORE,
    )


@pytest.mark.megatron
@pytest.mark.parametrize("name", CHECKS)
def test_in_megatrons_loop(name: str) -> None:
    assert answers()[name] is None, answers()[name]


def check(stock: one_process.Stock) -> None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from cppmega.proof import cpu_shims
    from tests.upstream_patches.optimizer import distributed_optimizer as small

    cpu_shims.init_distributed()
    unpatched = stock.module("megatron.core.optimizer.optimizer").ChainedOptimizer.load_state_dict
    started = mock.patch.object(filesystem_async, "_results_queue", queue.Queue())
    with small.on_cpu(), started, tempfile.TemporaryDirectory() as scratch:
        for saves, loads in ((1, 1), (1, 2), (2, 1), (2, 2)):
            folder = Path(scratch, f"{saves}{loads}")
            before = run(saves, 0)
            before.step(1)
            before.step(2)
            for group in before.optimizer.param_groups:
                group["lr"] = RATE
            save(before, folder)
            moved = run(loads, 7)
            moved.step(9)  # so that it has states of its own
            fails = pytest.raises((RuntimeError, KeyError), match=r"Expected 2|optimizer")
            with fails if saves != loads else contextlib.nullcontext():
                unpatched(moved.optimizer, loaded(moved, folder)["optimizer"])
            moved = run(loads, 7)
            load(moved, folder)
            the_same(before, moved, exactly=True)
            for one in (before, moved):
                one.step(3)
            the_same(before, moved, exactly=saves == loads)
        for saves, loads in ((1, 2), (2, 1)):
            others_are_refused(Path(scratch, f"others {saves}{loads}"), saves, loads)
            buckets_are_refused(Path(scratch, f"buckets {saves}"), saves)


def others_are_refused(folder: Path, saves: int, loads: int) -> None:
    """Assert that the states of optimizers that are not distributed are refused."""
    from cppmega.errors import CppmegaError

    before = run(saves, 0, distributed=False)
    before.step(1)
    save(before, folder)
    with pytest.raises(CppmegaError, match="checkpoint-of-another-layout"):
        load(run(loads, 7, distributed=False), folder)
    load(run(saves, 7, distributed=False), folder)

    mixed = folder.with_name(f"{folder.name}, mixed")
    before = run(1, 0)
    before.step(1)
    save(before, mixed)
    chain = run(2, 7).optimizer
    state = loaded(run(2, 7), mixed)["optimizer"]
    chain.chained_optimizers[1] = SimpleNamespace()  # not distributed, as in Muon's chain
    with pytest.raises(CppmegaError, match="checkpoint-of-another-layout"):
        chain.load_state_dict(state)


def buckets_are_refused(folder: Path, saves: int) -> None:
    """Assert that the preflight recognizes which layout saved states by bucket."""
    from megatron.core import parallel_state

    before = run(saves, 0)
    before.step(1)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    save(before, folder, distrib_optim_sharding_type="dp_reshardable", dp_cp_group=group)
    names = torch.distributed.checkpoint.FileSystemReader(folder).read_metadata()
    shapes = dict.fromkeys(names.state_dict_metadata, (4,))
    assert [refusals(shapes, expert_model_parallel_size=size) for size in (1, 2)] == [
        ["checkpoint-of-another-layout"] * (size != saves) for size in (1, 2)
    ]


def run(optimizers: int, seed: int, distributed: bool = True) -> Any:
    """A model; if there are two optimizers, the second has the last two layers."""
    from tests.upstream_patches.optimizer import distributed_optimizer as small

    make = small.DistributedDataParallel

    def marked(config: Any, options: Any, model: Any) -> Any:
        for p in model[2:].parameters():
            p.allreduce = optimizers == 1
        return make(config, options, model)

    with mock.patch.object(small, "DistributedDataParallel", marked):
        made = small.Run(seed, 0.1, distributed)
    assert len(made.optimizer.chained_optimizers) == optimizers
    return made


def save(saved: Any, folder: Path, **metadata: Any) -> None:
    from megatron.core import dist_checkpointing

    folder.mkdir()
    state = saved.optimizer.sharded_state_dict(saved.sharded(), metadata=METADATA | metadata)
    dist_checkpointing.save({"model": saved.sharded(), "optimizer": state}, str(folder))


def loaded(asking: Any, folder: Path) -> Any:
    """The state that a run requests, loaded from a checkpoint."""
    from megatron.core import dist_checkpointing

    model = asking.sharded()
    state = asking.optimizer.sharded_state_dict(model, True, metadata=METADATA)
    return dist_checkpointing.load({"model": model, "optimizer": state}, str(folder))


def load(asking: Any, folder: Path) -> None:
    state = loaded(asking, folder)
    with torch.no_grad():
        for name, p in asking.model.named_parameters():
            p.copy_(state["model"][name])
    asking.optimizer.load_state_dict(state["optimizer"])


def the_same(one: Any, other: Any, exactly: bool) -> None:
    """Compare masters, moments, steps and rates; `exactly`: to the bit."""
    kept = [states(run) for run in (one, other)]
    assert kept[0].keys() == kept[1].keys()
    for name, tensors in kept[0].items():
        assert tensors.keys() == kept[1][name].keys() == {"param", "exp_avg", "exp_avg_sq"}
        for key, tensor in tensors.items():
            bound = 0.0 if exactly else 1e-5
            torch.testing.assert_close(kept[1][name][key], tensor, rtol=bound, atol=bound)
    rates = [
        {(group["lr"], group["step"], group["wd_mult"]) for group in run.optimizer.param_groups}
        for run in (one, other)
    ]
    assert rates[0] == rates[1] and {rate for rate, *_ in rates[0]} == {RATE}, rates


def states(of: Any) -> dict[str, dict[str, Any]]:
    """The fp32 copy and the moments of each parameter."""
    names = {p: name for name, p in of.model.named_parameters()}
    return {
        names[p]: {
            key: value.detach().clone()
            for key, value in optimizer._get_main_param_and_optimizer_states(p).items()
        }
        for optimizer in of.optimizer.chained_optimizers
        for p in optimizer.model_param_group_index_map
    }


ONE = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(b, f).bucket_idx_0.param"
WHOLE = "optimizer.state.exp_avg.decoder.layers.0.mlp.experts.linear_fc1.weight"
MOE = {"use_distributed_optimizer": True, "num_experts": 4}


@pytest.mark.parametrize(
    ("saved", "arguments", "refused"),
    [
        (ONE, {"expert_model_parallel_size": 2}, True),
        (ONE, {"expert_model_parallel_size": 1}, False),
        (f"chained_0.{ONE}", {"expert_model_parallel_size": 1}, True),
        (f"chained_0.{ONE}", {"expert_model_parallel_size": 2}, False),
        (f"chained_0.{ONE}", {"expert_tensor_parallel_size": 2}, False),
        (f"chained_0.{ONE}", {"overlap_param_gather_with_optimizer_step": True}, False),
        (WHOLE, {"expert_model_parallel_size": 2}, False),
        (WHOLE, {}, False),
        (ONE, {"expert_model_parallel_size": 2, "no_load_optim": True}, False),
        (ONE, {"expert_model_parallel_size": 2, "finetune": True}, False),
        (ONE, {"expert_model_parallel_size": 2, "num_experts": None}, False),
        (ONE, {"expert_model_parallel_size": 2, "use_distributed_optimizer": False}, False),
    ],
)
def test_buckets_of_another_layout_are_refused(
    saved: str, arguments: dict[str, Any], refused: bool
) -> None:
    expected = ["checkpoint-of-another-layout"] * refused
    assert refusals({saved: (4,)}, **arguments) == expected


def refusals(saved: dict[str, tuple[int, ...]], **arguments: Any) -> list[str]:
    """Names of the page's errors for a run with experts that resumes from these tensors."""
    return [error.name for error in broken(PAGE, saved=saved, **MOE | arguments)]


def test_recipes_that_save_by_parameter_want_it() -> None:
    pages = catalogue.load()
    named = {PAGE, "fully_reshardable_bucket_padding"}
    experts = recipes_index.load("nam56r_h200_slice")
    assert experts.num_experts and not named & set(wanted_patches(experts, pages))
    by_parameter = experts.with_(dist_ckpt_optim_fully_reshardable=True)
    assert named <= set(wanted_patches(by_parameter, pages))
