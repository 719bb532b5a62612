"""Which loss DSA's indexer has in which step, without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cppmega.errors import CppmegaError
from cppmega.features.dsa import loss_schedule as schedule

GOOD = {
    "dsa_indexer_loss_coeff": 0.1,
    "dsa_indexer_use_sparse_loss": True,
    "context_parallel_size": 1,
    "cuda_graph_impl": "none",
}
SPARSE = SimpleNamespace(**GOOD)


@pytest.fixture(autouse=True)
def two_dense_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has begun no step, with two dense steps."""
    monkeypatch.setattr(schedule, "_iteration", None)
    monkeypatch.setattr(schedule, "_begun", False)
    monkeypatch.setattr(schedule, "_distributed", lambda: None)
    monkeypatch.setenv(schedule.STEPS, "2")


def named(call: Any, *given: Any) -> str:
    with pytest.raises(CppmegaError) as refused:
        call(*given)
    return refused.value.name


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (0, ["step 1: the loss of the DSA indexer is dense, and sparse from step 3", "step 3:"]),
        (1, ["step 2: the loss of the DSA indexer is dense", "step 3:"]),
        (2, ["step 3: the loss of the DSA indexer changes from dense to sparse"]),
        (3, ["step 4: the loss of the DSA indexer is sparse, and was dense in the first 2"]),
    ],
)
def test_the_step_decides_in_whichever_process(
    first: int, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for iteration in range(first, 5):
        for _ in range(2):  # a loop may say it for every micro-batch
            assert schedule.begin_step(iteration) == 2
            assert schedule.uses_sparse_loss(SPARSE) == (iteration >= 2)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(said)
    assert all(word in line for word, line in zip(said, lines, strict=True)), lines


def test_only_one_rank_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(schedule, "_rank", lambda: 1)
    schedule.begin_step(2)
    assert not capsys.readouterr().out


def test_an_unknown_step_is_an_error_only_where_a_layer_trains() -> None:
    assert schedule.begin_step(None) == 2
    assert named(schedule.uses_sparse_loss, SPARSE) == "dsa-dense-loss"


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "two"])
def test_a_number_of_steps_that_is_none(text: str) -> None:
    with pytest.raises(CppmegaError) as refused:
        schedule.dense_steps({schedule.STEPS: text})
    assert refused.value.name == "dsa-dense-loss" and schedule.STEPS in refused.value.next
    assert (schedule.stated_steps({}), schedule.stated_steps({schedule.STEPS: "7"})) == (None, 7)


def test_a_run_without_dsa_states_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(schedule.STEPS)
    assert schedule.begin_step(0) is None
    assert not capsys.readouterr().out
    assert named(schedule.uses_sparse_loss, SPARSE) == "dsa-dense-loss"


def group(*everyone: tuple[int | None, int]) -> SimpleNamespace:
    """A process group in which the ranks have said this."""

    def gather(into: list[Any], mine: tuple[int | None, int]) -> None:
        into[:] = everyone

    return SimpleNamespace(
        get_rank=lambda: 0, get_world_size=lambda: len(everyone), all_gather_object=gather
    )


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ((3, 0), "3 dense steps at iteration 0"),
        ((None, 0), "0 dense steps at iteration 0"),
        ((2, 1), "2 dense steps at iteration 1"),
    ],
)
def test_ranks_that_disagree(
    other: tuple[int | None, int], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "_distributed", lambda: group((2, 0), (2, 0), other))
    with pytest.raises(CppmegaError) as refused:
        schedule.begin_step(0)
    assert refused.value.name == "dsa-dense-loss"
    assert f"rank 2 has {said}" in refused.value.what
    monkeypatch.setattr(schedule, "_distributed", lambda: group((2, 0), (2, 0)))
    assert schedule.begin_step(0) == 2


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({}, ""),
        ({"dsa_indexer_loss_coeff": None}, "argument-without-effect"),
        ({"dsa_indexer_use_sparse_loss": False}, "argument-without-effect"),
        ({"cuda_graph_impl": "local"}, "unsupported"),
        ({"enable_cuda_graph": True}, "unsupported"),
        ({"dsa_kernel_backend": "tilelang"}, ""),
        ({"dsa_kernel_backend": "cudnn"}, ""),
        (
            {"dsa_kernel_backend": "cudnn", "context_parallel_size": 2},
            "unsupported",
        ),
        ({"dsa_kernel_backend": "cudnn", "dsa_indexer_topk_freq": 4}, "unsupported"),
    ],
)
def test_what_rules_the_dense_steps_out(change: dict[str, object], name: str) -> None:
    config = SimpleNamespace(**{**GOOD, **change})
    schedule.begin_step(1)
    if name:
        assert named(schedule.uses_sparse_loss, config) == name
    else:
        assert not schedule.uses_sparse_loss(config)
    schedule.begin_step(2)  # the configuration's own loss, whichever it is
    assert schedule.uses_sparse_loss(config) == config.dsa_indexer_use_sparse_loss


def test_a_checkpoint_with_another_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def remark(**saved: int | None) -> str:
        return schedule.remark_on_checkpoint(SimpleNamespace(**saved))

    assert remark(cppmega_dsa_dense_loss_steps=2) == ""
    assert "in its first 5 steps, this run has it in the first 2" in remark(
        cppmega_dsa_dense_loss_steps=5
    )
    assert "first 0 steps, this run has it in the first 2" in remark()
    monkeypatch.delenv(schedule.STEPS)
    assert remark() == remark(cppmega_dsa_dense_loss_steps=None) == ""
    assert "first 5 steps, this run has it in the first 0" in remark(cppmega_dsa_dense_loss_steps=5)
