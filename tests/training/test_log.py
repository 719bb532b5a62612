"""Lines of Megatron's log with what this package adds, and the metrics beside them."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from cppmega.errors import CppmegaError
from cppmega.recipe import index as recipes_index
from cppmega.recipe.arithmetic import flops
from cppmega.runs import metrics
from cppmega.training.log import MOCK, Log, to_megatrons_writers
from tests.preflight.contexts import SLICE

pytestmark = pytest.mark.slow

LINE = (
    " [2026-01-02 03:04:05.678901] iteration        7/      50 | consumed samples:            7 |"
    " elapsed time per iteration (ms): 671.0 | throughput per GPU (TFLOP/s/GPU): 46.5 |"
    " learning rate: 6.000000E-06 | global batch size:     1 | lm loss: 1.112345E+01 |"
    " mtp_1 loss: 1.122345E+01 | loss scale: 1.0 | grad norm: 4.310 |"
    " number of skipped iterations:   0 | number of nan iterations:   0 |"
)


def log(
    tmp_path: Path, mock: bool = False, recipe: Any = SLICE, **options: Any
) -> tuple[list[str], Any]:
    """A log around a list, and the function that Megatron would print with."""
    said: list[str] = []
    file = tmp_path / "m.jsonl"
    given = {"squares": lambda: None, "peak": lambda: 61.5, "metrics": file, **options}
    own = Log(recipe, 1, mock=mock, **given)
    return said, own.around(said.append, lambda: True)


def test_a_log_line_says_both_throughputs(tmp_path: Path) -> None:
    said, say = log(tmp_path)
    say(LINE)
    assert said[0].startswith(LINE)
    ours = flops(SLICE) * 4096 / 0.671 / 1e12
    assert f"with every layer counted (TFLOP/s/GPU): {ours:.1f} |" in said[0]
    assert "tokens/s: 6104 |" in said[0] and "peak memory (GiB): 61.5 |" in said[0]
    assert MOCK not in said[0]
    row = json.loads((tmp_path / "m.jsonl").read_text())
    assert (row["step"], row["loss"], row["grad_norm"]) == (7, 11.12345, 4.31)
    assert row["tflops_per_gpu_by_megatron"] == 46.5
    assert row["losses"] == {"lm loss": 11.12345, "mtp_1 loss": 11.22345}
    assert row["tokens_per_second"] == pytest.approx(4096 / 0.671)


def test_megatrons_writers_get_what_the_line_adds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorBoard and W&B show the same numbers, unless Megatron has no such writer."""
    tensorboard, wandb = Mock(), Mock()
    megatron = SimpleNamespace(
        get_tensorboard_writer=lambda: tensorboard, get_wandb_writer=lambda: wandb
    )
    monkeypatch.setitem(sys.modules, "megatron.training", megatron)
    load = ((0.5, 1.5), (0.25, 2.0))
    _, say = log(tmp_path, expert_load=lambda: load, scalars=to_megatrons_writers)
    say("saving checkpoint")
    say(LINE)
    (values, step), _ = wandb.log.call_args
    assert step == 7 and [call.args for call in tensorboard.add_scalar.call_args_list] == [
        (name, value, 7) for name, value in values.items()
    ]
    assert values["cppmega/tokens_per_second"] == pytest.approx(4096 / 0.671)
    assert values["cppmega/peak_gib"] == 61.5 and "cppmega/graph_pool_gib" not in values
    assert (values["cppmega/expert_load_min"], values["cppmega/expert_load_max"]) == (0.25, 2.0)
    megatron.get_tensorboard_writer = megatron.get_wandb_writer = lambda: None
    say(LINE)
    assert wandb.log.call_count == 1


def test_mock_data_marks_every_line_with_a_throughput(tmp_path: Path) -> None:
    said, say = log(tmp_path, mock=True)
    say(LINE)
    say("saving checkpoint")
    assert said[0].count(MOCK) == 2 and said[0].strip().startswith(MOCK)
    assert said[1] == "saving checkpoint"
    assert json.loads((tmp_path / "m.jsonl").read_text())["mock_data"] is True


def test_every_line_of_a_part_of_a_model_says_so(tmp_path: Path) -> None:
    said, say = log(tmp_path, recipe=recipes_index.load("nam56r_h100_1gpu_cut"))
    say(LINE)
    say("saving checkpoint")
    assert all(line.startswith(" CUT MODEL: 24 of 52 layers |") for line in said)
    assert said[0].count("lm loss") == 1 and said[1].endswith("saving checkpoint")


def test_a_profiled_step_is_marked(tmp_path: Path) -> None:
    disturbed = iter([True, False])
    said, say = log(tmp_path, profiled=lambda: next(disturbed))
    say(LINE)
    say(LINE)
    assert [line.endswith(" PROFILED |") for line in said] == [True, False]
    rows = map(json.loads, (tmp_path / "m.jsonl").read_text().splitlines())
    assert [row["profiled"] for row in rows] == [True, False]


def test_a_line_ends_with_the_pools_of_cuda_graphs_where_there_are_any(tmp_path: Path) -> None:
    pools = iter([None, 3.2109375])
    said, say = log(tmp_path, graph_pools=lambda: next(pools))
    say(LINE)
    say(LINE)
    assert said[0].endswith(" peak memory (GiB): 61.5 |")
    assert said[1].endswith(" peak memory (GiB): 61.5 | CUDA graphs (GiB): 3.2 |")
    rows = metrics.steps(tmp_path / "m.jsonl")
    assert [row.graph_pool_gib for row in rows] == [None, 3.2109375]


def test_a_line_has_the_load_of_the_experts_and_its_row_that_of_each_layer(tmp_path: Path) -> None:
    said, say = log(tmp_path, expert_load=lambda: ((0.31, 1.4), (0.62, 1.926)))
    say(LINE)
    assert said[0].endswith(" | experts' load: 0.31 to 1.93 of the mean |")
    (row,) = metrics.steps(tmp_path / "m.jsonl")
    assert row.expert_load == ((0.31, 1.4), (0.62, 1.926))


def test_a_spike_is_marked_in_its_line(tmp_path: Path) -> None:
    said, say = log(tmp_path)
    for _ in range(20):
        say(LINE)
    say(LINE.replace("4.310", "43.10"))
    say(LINE)
    assert [at for at, line in enumerate(said) if "SPIKE" in line] == [20]
    assert "| SPIKE: grad norm 43.1 (median of the last 20: 4.31) |" in said[20]


@pytest.mark.parametrize("number", ["1.112345E+01", "4.310"])
def test_a_logged_nan_is_kept_and_stops_the_run(number: str, tmp_path: Path) -> None:
    said, say = log(tmp_path)
    with pytest.raises(CppmegaError, match="step-not-finite"):
        say(LINE.replace(number, "nan"))
    row = json.loads((tmp_path / "m.jsonl").read_text())
    assert math.isnan(row["loss"]) or math.isnan(row["grad_norm"])
    assert len(said) == 1
