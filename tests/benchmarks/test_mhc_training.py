"""The benchmark of hyper-connections in training: what it runs, judges and leaves out, on CPU."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import torch

from cppmega.recipe import index as recipes_index
from cppmega.recipe.render import render
from tests.support import patched, python
from tests.support.weekly import weekly

training = importlib.import_module("benchmarks.slices.mhc_training")
curves = importlib.import_module("benchmarks.slices.curves")

GIB = 2**30
CURVE = {"loss": [3.0, 2.0], "grad norm": [1.0, 0.5]}
SAVED = 0.25 * GIB
"""Four streams of the recipe gpt_mhc_h200: 8192 tokens, C 4096, bf16."""


@pytest.mark.parametrize(
    ("curve", "references", "found"),
    [
        ([3.0, 2.0], [[3.0, 2.0], [3.0, 2.0]], "within the noise"),
        ([3.0, 2.0000001], [[3.0, 2.0], [3.0, 2.0]], "within the noise"),
        ([3.0, 2.001], [[3.0, 2.0], [3.0, 2.0]], "**beyond the noise**"),
        ([3.0, 2.002], [[3.0, 2.0], [3.0, 2.001]], "within the noise"),
        ([3.0, 2.004], [[3.0, 2.0], [3.0, 2.001]], "**beyond the noise**"),
        ([3.0, float("nan")], [[3.0, 2.0], [3.0, 2.001]], "**beyond the noise**"),
        ([3.0, 2.0], [[3.0, 2.0], [3.0, float("inf")]], "**beyond the noise**"),
        ([3.0], [[3.0, 2.0], [3.0, 2.0]], "the runs have other steps"),
    ],
)
def test_a_curve_is_judged_by_the_noise_of_the_references(
    curve: list[float], references: list[list[float]], found: str
) -> None:
    assert curves.verdict(curve, references)[-1] == found


@pytest.mark.parametrize(
    ("extra", "together", "said"),
    [
        (SAVED, None, "1.00 times them; the target of 1.1 is met"),
        (1.2 * SAVED, None, "1.20 times them; the target of 1.1 is missed"),
        (4 * SAVED, 2, "1.00 times them; the target of 1.1 is met"),
    ],
)
def test_memory_is_counted_above_the_parameters(
    extra: float, together: int | None, said: str
) -> None:
    base = {"peak_bytes": 50 * GIB, "states_bytes": 30 * GIB}
    run = {
        "peak_bytes": 51 * GIB + extra,
        "states_bytes": 31 * GIB,
        "layers": 8,
        "stream_bytes": SAVED / 4,
    }
    assert said in training.kept("recomputed", run, base, together)


def test_every_run_of_a_recipe_says_what_it_changes() -> None:
    for part, runs in training.RUNS.items():
        for label, changes in runs.items():
            recipe = recipes_index.with_text(recipes_index.load(training.RECIPES[part]), changes)
            argv = render(recipe, "0.19.2").argv
            assert ("--enable-mhc-connections" in argv) is (label != "without")
            plain = label in ("without", *training.REFERENCES)
            assert ("--use-fused-mhc" in argv) is not plain
            assert ("mhc" in argv) is (label in training.BLOCKS)
            assert recipe.mhc_recompute_layer_num == training.BLOCKS.get(label)


class Stub:
    """Takes the place of `Bench`: a run of 12 steps, or one that does not fit."""

    seen: list[str]

    def __init__(self, recipe: Any, changes: tuple[str, ...], *given: Any) -> None:
        self.plain = "use_fused_mhc=False" in changes
        self.peak = 60.0 + ("mhc_num_residual_streams=1" not in changes)

    def clear(self, name: str) -> None:
        """Note that a run begins."""
        self.seen.append(name)

    def tree(self, name: str) -> Path:
        """No tree is needed."""
        return Path(name)

    def start(self, name: str, tree: Path) -> None:
        """Nothing is started."""

    def wait(self, name: str, process: None) -> None:
        """The reference does not fit; a run of the slice fails."""
        if self.plain:
            raise MemoryError(name)
        if name.startswith("slice-ours"):
            raise click.ClickException("no such kernel")

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Steps as the trainer writes them."""
        step = {"loss": 2.0, "grad_norm": 1.0, "seconds": 0.5, "tokens_per_second": 9.0}
        step |= {"tflops_per_gpu": 1.0, "tflops_per_gpu_by_megatron": 1.0, "losses": {}}
        start = {"start": 1, "mock_data": False, "overlay": "d1g3st"}
        rows = [
            {"step": n, "mock_data": False, "peak_gib": self.peak, **step} for n in range(1, 13)
        ]
        return [start, *rows]


Made = Callable[..., Any]


@pytest.fixture(name="made")
def made_with_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(training, "Bench", Stub)
    monkeypatch.setattr(training.trees, "copy", lambda site, root: None)
    monkeypatch.setattr(training.trees, "apply", lambda root, *options, **_: None)
    facts: dict[str, Any] = {"recipe": "gpt_mhc_h200", "changes": [], "date": "d", "gpus": 1}
    facts |= {"stack": {"gpu": "NVIDIA H200"}, "data": dict.fromkeys(("fingerprint", "documents"))}
    facts["data"]["tokens"] = 1
    monkeypatch.setattr(training, "header", lambda bench: facts)
    said = json.dumps({"GPT": CURVE, "hybrid": CURVE})
    command = [sys.executable, "-c", f"print({said!r})"]
    monkeypatch.setattr(training.training_runs, "command_of", lambda *given, **named: command)
    monkeypatch.setattr(Stub, "seen", [], raising=False)

    def make(seconds: float = 600.0, **how: Any) -> Any:
        deadline = time.monotonic() + seconds
        return training.Training(tmp_path, tmp_path, tmp_path, tmp_path, 12, deadline, **how)

    return make


def test_runs_are_written_one_by_one_and_continued(made: Made, tmp_path: Path) -> None:
    made(seconds=1).part("gpt")
    assert Stub.seen == []  # there is no time for a run
    first = made()
    first.part("gpt")
    first.part("small")
    with pytest.raises(click.ClickException):
        first.part("slice")
    kept = json.loads((tmp_path / "mhc_training_h200.json").read_text())
    assert list(kept["gpt"]) == list(training.RUNS["gpt"]) and list(kept["slice"]) == ["without"]
    assert kept["gpt"]["reference"]["out_of_memory"] is True
    assert kept["gpt"]["ours"]["stream_bytes"] * 4 == SAVED
    text = (tmp_path / "mhc_training_h200.md").read_text()
    assert "Not run: slice, ours." in text
    assert "| fused, loss | 3 | 2 | 0.00e+00 | 0.00e+00 | within the noise |" in text
    assert "| reference |  |  |  | out of memory |  |" in text
    assert "| ours | 500.0 | +0.0% | 9 | 61.00 | +1.00 |" in text
    assert "fewer than two references" in text
    result = json.loads((tmp_path / "gpt_mhc_h200.json").read_text())
    assert result["headline"] == "1 x NVIDIA H200: overlay 9 tokens/s, 61.0 GiB"
    assert (tmp_path / result["log"]).is_file() and "loss" not in result["runs"]["overlay"]
    repeated = {**kept, "gpt": {**kept["gpt"]}}
    repeated["gpt"]["without"] = kept["gpt"]["without"] | {"milliseconds": 400.0}
    assert "| ours | 500.0 | +0.0% | 9 |" in "\n".join(training.table(repeated))
    del kept["gpt"]["ours"]["milliseconds_without"]
    assert "| ours | 500.0 | another call | 9 | 61.00 | +1.00 |" in "\n".join(training.table(kept))
    training.draw(kept, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    Stub.seen.clear()
    with pytest.raises(click.ClickException):
        made().part("slice")
    assert Stub.seen == ["slice-ours"]
    made(again=True).part("gpt")
    assert len(Stub.seen) == 1 + len(training.RUNS["gpt"])


@weekly
@pytest.mark.slow
def test_kernels_train_both_small_models_as_the_reference() -> None:
    code = """
    from benchmarks.slices import mhc_curves as c

    for way in ("reference", "nudged", "fused"):
        c.main(way, 1, c.TINY)
    """
    done = python(patched("0.19.2", *training.PAGES), code, interprets=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for model in ("GPT", "hybrid"):
        reference, *others = (each[model] for each in found)
        for curves in others:
            for name, curve in curves.items():
                assert curve == pytest.approx(reference[name], rel=1e-6)
