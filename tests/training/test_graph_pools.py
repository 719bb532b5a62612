"""What CUDA graphs' pools reserve, of snapshots in the shape of torch's, and when one is taken."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from cppmega.recipe import index as recipes_index
from cppmega.training import pretrain
from cppmega.training.graph_pools import GraphPools, reserved_gib

GIB = 2**30
PLAIN, GRAPH, MADE = (0, 0), (0, 1), (2, 0)
"""Ids: of the default pool, of `graph_pool_handle` or a MemPool, of a capture without a pool."""


def segment(pool: tuple[int, int], size: int, used: int = 0) -> dict[str, Any]:
    """A segment of `torch.cuda.memory_snapshot`, of torch 2.11."""
    block = {"address": 2**40, "size": size, "requested_size": used, "state": "inactive"}
    return {
        **{"device": 0, "address": 2**40, "stream": 0, "segment_type": "large"},
        **{"segment_pool_id": pool, "is_expandable": False, "frames": []},
        **{"total_size": size, "allocated_size": used, "active_size": used},
        **{"requested_size": used, "blocks": [{**block, "frames": []}]},
    }


def snapshot(*private: int) -> list[dict[str, Any]]:
    """A default pool, and private segments of these sizes in GiB."""
    pools = [segment(MADE if at else GRAPH, size * GIB) for at, size in enumerate(private)]
    return [segment(PLAIN, 40 * GIB, 30 * GIB), *pools]


class Snapshots:
    """Snapshots one after the other, of private segments of these sizes in GiB."""

    def __init__(self, *sizes: tuple[int, ...]) -> None:
        self.left = list(sizes)

    def __call__(self) -> list[dict[str, Any]]:
        return snapshot(*self.left.pop(0))


def test_all_pools_but_the_default_one_are_added_up() -> None:
    held = segment(MADE, GIB // 4, used=GIB // 4)
    assert reserved_gib([*snapshot(3, 1), held]) == 4.25
    assert reserved_gib([segment(PLAIN, GIB)]) is None
    assert reserved_gib([]) is None


def test_the_number_is_repeated_once_two_logged_steps_in_a_row_agree() -> None:
    taken = Snapshots((), (), (1,), (3, 1), (3, 1), (9,))
    pools = GraphPools("local", taken)
    assert [pools.gib() for _ in range(8)] == [None, None, 1, 4, 4, 4, 4, 4]
    assert taken.left == [(9,)], "steps before a capture do not count, and none follows two equal"


def test_equal_numbers_that_are_not_in_a_row_are_no_end() -> None:
    taken = Snapshots((2,), (), (2,), (2,))
    pools = GraphPools("transformer_engine", taken)
    assert [pools.gib() for _ in range(5)] == [2, None, 2, 2, 2]
    assert not taken.left


def test_without_graphs_no_snapshot_is_taken() -> None:
    pools = GraphPools("none", Snapshots())
    assert pools.gib() is None


@pytest.fixture(name="training")
def what_the_trainer_wraps() -> Iterator[Any]:
    """Megatron's modules with the functions that `_install_hooks` looks up, and nothing else."""
    training = ModuleType("training")
    logging = ("print_rank_last", "evaluate_and_print_results")
    for name in (*logging, "train_step", "finalize_model_grads"):
        setattr(training, name, mock.Mock())
    with (
        mock.patch.object(pretrain, "_profiler", lambda plan: mock.MagicMock()),
        mock.patch.object(pretrain, "_record", mock.Mock()),
        mock.patch("torch.distributed.get_rank", lambda: 0),
        mock.patch("torch.distributed.get_world_size", lambda: 1),
    ):
        yield training


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({}, False),
        ({"cuda_graph_impl": "none"}, False),
        ({"cuda_graph_impl": "local"}, True),
        ({"cuda_graph_impl": "transformer_engine"}, True),
        ({"cuda_graph_impl": "none", "external_cuda_graph": True}, True),
    ],
)
def test_the_arguments_of_the_run_decide(training: Any, given: dict[str, Any], taken: bool) -> None:
    options = SimpleNamespace(mock_data=False, metrics=None)
    plan: Any = SimpleNamespace(recipe=recipes_index.load("nam56r_h200_slice"), options=options)
    checkpointing = ModuleType("checkpointing")
    checkpointing.check_checkpoint_args = mock.Mock()  # type: ignore[attr-defined]
    with (
        mock.patch.object(pretrain, "Log") as log,
        mock.patch("torch.cuda.memory_snapshot", lambda: snapshot(3)),
    ):
        step, held_out = mock.Mock(), mock.Mock()
        args = SimpleNamespace(overlap_param_gather=False, **given)
        pretrain._install_hooks(training, checkpointing, plan, step, held_out, args)
    assert log.call_args.kwargs["graph_pools"]() == (3 if taken else None)
