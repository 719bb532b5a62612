"""Arguments that a script adds to Megatron's: from where, and what is left unknown."""

from __future__ import annotations

import argparse

import pytest

from cppmega.errors import CppmegaError
from cppmega.host import redact
from cppmega.preflight.workers.line import Added, _fewest_ranks, respelled

HERE = "tests.preflight.script_arguments"


def added(*sources: str) -> Added:
    """The arguments of these sources on top of a parser with one of its own."""
    found = Added(sources)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--lr", type=float)
    found.provide(parser)
    return found


@pytest.mark.parametrize(
    ("sources", "names"),
    [
        ((), ()),
        ((HERE,), ()),
        ((f"{HERE}:add",), ("rollout_size", "gpus")),
        ((f"{HERE}:adding()", f"{HERE}:add"), ("rollout_shuffle", "rollout_size", "gpus")),
    ],
)
def test_a_source_adds_its_arguments(sources: tuple[str, ...], names: tuple[str, ...]) -> None:
    assert added(*sources).names == names


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("tests.preflight.no_such_module", "ModuleNotFoundError"),
        (f"{HERE}:missing", "AttributeError"),
        (f"{HERE}:add()", "TypeError"),
        (f"{HERE}:again", "ArgumentError"),
        (":add", "ValueError"),
    ],
)
def test_a_source_that_adds_nothing_is_named(source: str, why: str) -> None:
    with pytest.raises(CppmegaError) as caught:
        added(source)
    assert caught.value.name == "import-failed"
    assert source in caught.value.what and why in caught.value.what


def test_words_that_no_argument_explains() -> None:
    found = added(f"{HERE}:add")
    line = [
        "--lr",
        "1",
        "2",
        "--rollout-size=4",
        "--rolout-size",
        "3",
        "--wandb-key",
        "abc",
        "--x=y",
    ]
    assert found.unknown(line) == {
        "2": "",
        "--rolout-size 3": "--rollout-size",
        f"--wandb-key '{redact.HIDDEN}'": "",
        "--x=y": "",
    }
    assert found.unknown(["--lr", "-1"]) == {}
    assert Added(()).unknown(["--anything"]) == {}  # Megatron's `parse_args` was replaced


@pytest.mark.parametrize(
    ("line", "read", "changed"),
    [
        ("--micro_batch_size 2 --lr 1e-4", "--micro-batch-size 2 --lr 1e-4", "--micro_batch_size"),
        ("--micro_batch_size=2", "--micro-batch-size 2", "--micro_batch_size"),
        ("--finetune true --epochs 1", "--finetune --epochs 1", "--finetune"),
        ("--no_save_optim true", "--no-save-optim", "--no_save_optim"),
        ("--finetune false --lr=1", "--lr=1", "--finetune"),
        ("--finetune --micro-batch-size 2", "--finetune --micro-batch-size 2", ""),
        ("--micro_batch_size None", "--micro_batch_size None", ""),
        ("--finetune yes", "--finetune yes", ""),
        ("--num_epochs 1 train.lr=1 -tp 2 -- x", "--num_epochs 1 train.lr=1 -tp 2 -- x", ""),
    ],
)
def test_fields_are_read_as_the_arguments_that_they_name(
    line: str, read: str, changed: str
) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--micro-batch-size", type=int)
    parser.add_argument("--finetune", action="store_true")
    parser.add_argument("--no-save-optim", action="store_true")
    assert respelled(line.split(), parser) == (read.split(), tuple(changed.split()))


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [
        ({}, 1),
        ({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4}, 8),
        ({"context_parallel_size": 3, "expert_model_parallel_size": 4}, 12),
        ({"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4}, 8),
        (
            {
                "tensor_model_parallel_size": 4,
                "expert_model_parallel_size": 8,
                "expert_tensor_parallel_size": 1,
                "pipeline_model_parallel_size": 2,
            },
            16,
        ),
        ({"tensor_model_parallel_size": 2, "tensor_parallel_num_weight_shards": 4}, 4),
    ],
)
def test_the_fewest_ranks_of_a_line(sizes: dict[str, int], ranks: int) -> None:
    assert _fewest_ranks(argparse.Namespace(**sizes)) == ranks
