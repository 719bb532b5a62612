"""The benchmark of the DSA kernels in training: turns, time limit, ratios and curves on CPU."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from cppmega.recipe import index as recipes_index
from cppmega.recipe import results
from cppmega.recipe.render import render
from cppmega.recipe.run_options import RunOptions
from cppmega.runs import json_file
from cppmega.training.options import read
from cppmega.training.requirements import Start
from tests.runs.test_profile import made_profile
from tests.support import pristine

runs = importlib.import_module("benchmarks.harness.runs")
slices = importlib.import_module("benchmarks.slices.turns")
INDEXER = slices.SUBJECTS["indexer"]
MILLISECONDS = {
    "before": 1000,
    "after": 700,
    **dict.fromkeys(("stock", "again", "ours", "te"), 300),
}
TRAINER = """
import json, sys
metrics, side, failure, late, steps, milliseconds, profiled = json.loads(sys.argv[1])
if failure:
    sys.exit(failure)
with open(metrics, "a") as file:
    def write(row):
        print(json.dumps(row), file=file)
    write({"start": "nam56r_h200_slice", "overlay": side, "mock_data": False})
    for step in range(1, steps + 1):
        seconds = (milliseconds + step % 3) / 1000
        loss = 11 - step / 100 + {"again": 1e-4, "ours": 1.5e-4, "te": 1e-3}.get(side, 0)
        indexer = 1 + {"again": 1e-6, "ours": 1e-3}.get(side, 0)
        write({"step": step, "seconds": seconds, "tokens_per_second": 4096 / seconds,
               "tflops_per_gpu": 1.0, "tflops_per_gpu_by_megatron": 1.0, "peak_gib": 50.0,
               "loss": loss, "grad_norm": 1.0, "mock_data": False,
               "losses": {"lm loss": loss, "indexer loss": indexer},
               "profiled": step > steps - profiled})
sys.exit(late)
"""


class Bench(runs.Bench):  # type: ignore[misc, name-defined]
    """Runs a stand-in for the trainer; keeps the options that it was started with."""

    full: tuple[str, ...] = ()
    period = 0.05
    failing: str = ""
    failing_late: str = ""
    started: dict[str, RunOptions]
    passed: dict[str, tuple[str, ...]]

    def start(self, name: str, tree: Path, *options: str) -> subprocess.Popen[bytes]:
        parsed, self.passed[name] = read(options)
        self.started[name] = parsed
        changes = dict(change.split("=") for change in parsed.changes)
        side = tree.name
        if parsed.profile:
            assert parsed.profile_folder is not None
            parsed.profile_folder.mkdir(exist_ok=True)
            file = parsed.profile_folder / slices.SUMMARY
            json_file.write(file, json_file.plain(made_profile()))
        recipe = recipes_index.with_text(self.recipe, parsed.changes)
        Start(recipe, parsed).check("the profiler")
        out_of_memory = name.split("-")[0] in self.full and side == "before"
        failure = "torch.OutOfMemoryError: CUDA out of memory." if out_of_memory else ""
        call = [str(self.metrics(name)), side, failure or "it broke" * (side == self.failing)]
        call += ["    what: it ended badly\n    next: look" * (side == self.failing_late) or 0]
        call += [int(changes["train_iters"]), MILLISECONDS[side], 3 * bool(parsed.profile)]
        log = (self.out / f"{name}.log").open("ab")
        with log:
            command = [sys.executable, "-c", TRAINER, json.dumps(call)]
            return subprocess.Popen(command, stdout=log, stderr=log)


def turns(tmp_path: Path, seconds: float = 600.0, **how: Any) -> Any:
    recipe = recipes_index.load("nam56r_h200_slice")
    bench = Bench(recipe, (), tmp_path, tmp_path, tmp_path, tmp_path / "data", 20.0)
    bench.started, bench.passed = {}, {}
    facts: dict[str, Any] = {"stack": {"gpu": "H200"}, "date": "2026-01-01", "gpus": 1}
    facts |= {"changes": [], "data": {"fingerprint": "f", "documents": 1, "tokens": 2}}
    made = slices.Turns(bench, INDEXER, time.monotonic() + seconds, 4, 5, facts=facts, **how)
    made.tree = lambda side: tmp_path / "trees" / side
    return made


def part(tmp_path: Path, name: str) -> Any:
    return json.loads((tmp_path / f"{name}.json").read_text())


def test_sides_take_turns_and_are_profiled_last(tmp_path: Path) -> None:
    made = turns(tmp_path)
    made.part("fused2")
    runs = part(tmp_path, "fused2")["runs"]
    assert list(runs) == ["before1", "after1", "after2", "before2"]
    assert [name for name, run in runs.items() if "profile" in run] == ["after2", "before2"]
    assert {len(run["seconds"]) for run in runs.values()} == {4}, "profiled steps do not count"
    options = made.bench.started["fused2-after2"]
    assert "micro_batch_size=2" in options.changes and options.profile == 2
    text = slices.write_report(tmp_path, INDEXER)
    assert re.search(r"after over before: 1\.4\d\d \(1\.4\d\d to 1\.4\d\d\)", text)
    assert "the target of 1.4 is met" in text
    assert "Profile, before:" in text and "A is before, B after:" in text
    assert (tmp_path / f"{INDEXER.name}.md").read_text() == text


def test_a_recipe_with_these_settings_gets_the_slower_run(tmp_path: Path) -> None:
    made = turns(tmp_path)
    made.part("fused8")
    result = part(tmp_path, "fused8")
    result["runs"]["after2"]["tokens_per_second"] = 1234.0
    (tmp_path / "fused8.json").write_text(json.dumps(result))
    slices.write_report(tmp_path, INDEXER)
    found = results.collect(tmp_path)
    assert [one.recipe for one in found] == ["nam56r_h200_slice_fused"]
    assert found[0].headline == "1 x H200: overlay 1234 tokens/s, 50.0 GiB"
    text = (tmp_path / "nam56r_h200_slice_fused.md").read_text()
    assert "nam56r_h200_slice_fused, 2026-01-01" in text and "| tokens/s | 1234.0 |" in text
    data = json.loads((tmp_path / f"{INDEXER.name}.json").read_text())
    assert data["fused8"]["runs"]["after2"]["tokens_per_second"] == 1234.0


@pytest.mark.megatron
@pytest.mark.parametrize("name", [name for name in slices.PARTS if slices.PARTS[name].recipe])
def test_a_part_has_the_settings_of_its_recipe(tmp_path: Path, name: str) -> None:
    """But for the number of steps; Megatron takes the last one of repeated arguments."""
    part, made = slices.PARTS[name], turns(tmp_path)
    parsed, _ = read([*made.options(part, name, False), "--", *part.arguments])
    run = recipes_index.with_text(made.bench.recipe, parsed.changes)
    found = _settings((*render(run, "0.19.2").argv, *part.arguments))
    want = _settings(render(recipes_index.load(part.recipe), "0.19.2").argv)
    assert found | {"--train-iters": ()} == want | {"--train-iters": ()}


def _settings(words: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Each argument, and the values after its last mention."""
    found: dict[str, tuple[str, ...]] = {}
    for word in words:
        if word.startswith("--"):
            name, found[word] = word, ()
        else:
            found[name] += (word,)
    return found


def test_the_sides_may_differ_in_their_arguments_alone(tmp_path: Path) -> None:
    made = turns(tmp_path)
    made.subject = slices.SUBJECTS["graphs"]
    made.part("graphs2")
    made.part("curves_graphs")
    for run, arguments in made.bench.passed.items():
        assert ("--cuda-graph-impl" in arguments) is ("after" in run or "ours" in run), run
        assert "tilelang" in arguments
    assert "train_iters=50" in made.bench.started["curves_graphs-ours1"].changes
    text = slices.write_report(tmp_path, made.subject)
    assert "the target of 1.3 is met" in text and "| lm loss |" in text
    del made.tree
    made.bench.tree = lambda name: tmp_path / name
    assert made.tree("before") == made.tree("ours") == tmp_path / "after"


def test_layers_that_share_keys_are_compared_with_both_kinds_of_graphs(tmp_path: Path) -> None:
    made = turns(tmp_path)
    made.subject = slices.SUBJECTS["sharing"]
    made.part("curves_shared")
    graphs = {"ours": "local", "te": "transformer_engine"}
    for run, arguments in made.bench.passed.items():
        side = run.split("-")[1][:-1]
        assert graphs.get(side) in (*arguments, None) and ("attn" in arguments) is (side in graphs)
        recipe = recipes_index.with_text(made.bench.recipe, made.bench.started[run].changes)
        assert dict(recipe.wanted_gates) == made.subject.switches
        assert recipe.layout.trunk.count("D") == len(recipe.dsa_index_pattern) == 9
    assert list(made.bench.passed) == [f"curves_shared-{x}1" for x in ("stock", "again", *graphs)]
    text = slices.write_report(tmp_path, made.subject)
    ours, te = (line for line in text.splitlines() if line.startswith("| lm loss"))
    assert "ours from stock" in text and "5.00e-05 | within the noise" in ours
    assert "te from stock" in text and "9.00e-04 | **beyond the noise**" in te


def test_a_side_that_fails_leaves_the_others_their_results(tmp_path: Path) -> None:
    made = turns(tmp_path)
    made.bench.failing = "ours"
    with pytest.raises(click.ClickException, match="it broke"):
        made.part("curves_shared")
    assert list(part(tmp_path, "curves_shared")["runs"]) == ["stock1", "again1", "te1"]
    text = slices.write_report(tmp_path, slices.SUBJECTS["sharing"])
    assert "te from stock" in text and "ours from stock" not in text
    made.bench.failing = "after"
    with pytest.raises(click.ClickException, match="it broke"):
        made.part("shared1")
    assert list(part(tmp_path, "shared1")["runs"]) == ["before1", "before2"]
    assert list(made.bench.started)[4:] == [
        f"shared1-{x}" for x in ("before1", "after1", "before2")
    ]


def test_a_curve_whose_run_fails_at_its_end_is_judged_and_the_failure_is_stated(
    tmp_path: Path,
) -> None:
    made = turns(tmp_path)
    made.bench.failing_late = "te"
    made.part("curves_shared")
    text = slices.write_report(tmp_path, slices.SUBJECTS["sharing"])
    assert "te from stock" in text and "\nte1 failed after its last step: what: it ended" in text
    assert "tokens/s, medians of the second half of each run (peak memory): stock1 " in text
    made.bench.failing_late = "after"  # a speed needs a run that ended well
    with pytest.raises(click.ClickException, match="it ended badly"):
        made.part("shared1")


def test_a_call_continues_where_the_last_one_ended(tmp_path: Path) -> None:
    first = turns(tmp_path, seconds=100)
    first.part("fused8")  # a run may take longer than that
    assert not (tmp_path / "fused8.json").exists() and first.bench.started == {}
    second = turns(tmp_path)
    second.part("fused8")
    stamps = part(tmp_path, "fused8")
    third = turns(tmp_path)
    third.part("fused8")
    assert third.bench.started == {} and part(tmp_path, "fused8") == stamps
    del stamps["runs"]["after2"]
    (tmp_path / "fused8.json").write_text(json.dumps(stamps))
    third.part("fused8")
    assert list(third.bench.started) == ["fused8-after2"]
    again = turns(tmp_path, again=True)
    again.part("fused8")
    assert len(again.bench.started) == 4


def test_out_of_memory_is_a_result_and_not_repeated(tmp_path: Path) -> None:
    made = turns(tmp_path)
    made.bench.full = ("dense8",)
    made.part("dense8")
    made.part("fused8")
    assert list(made.bench.started)[:3] == ["dense8-before1", "dense8-after1", "dense8-after2"]
    assert part(tmp_path, "dense8")["runs"]["before1"] == {"side": "before", "out_of_memory": True}
    text = slices.write_report(tmp_path, INDEXER)
    assert "| before1 |  | out of memory |" in text and "No ratio" in text
    assert "dense over sparse loss: 1.000" in text and "the target of 0.9 is met" in text


def test_curves_are_judged_by_the_noise_of_two_stock_runs(tmp_path: Path) -> None:
    made = turns(tmp_path)
    made.part("curves_sparse")
    assert made.bench.started["curves_sparse-ours1"].profile is None
    rows = {
        line.split("|")[1].strip(): line
        for line in slices.write_report(tmp_path, INDEXER).splitlines()
        if line.startswith("| ")
    }
    assert "1.00e-04 | 5.00e-05 | within the noise" in rows["lm loss"]
    assert "1.00e-06 | 9.99e-04 | **beyond the noise**" in rows["indexer loss"]
    assert "0.00e+00 | 0.00e+00 | within the noise" in rows["grad norm"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 11.5])
def test_ours_is_not_within_the_noise_by_accident(value: float) -> None:
    stock, again = {1: 11.0, 2: 10.0}, {1: 11.1, 2: 10.0}
    assert slices._verdict(stock, again, {1: value, 2: 10.0})[-1] == "**beyond the noise**"
    assert "other steps" in slices._verdict(stock, again, {1: 11.0})[-1]


def test_the_pools_of_cuda_graphs_are_a_column_only_where_a_run_has_them() -> None:
    row = {"side": "after", "overlay": "abc", "seconds": [0.4, 0.6], "milliseconds": 500.0}
    row |= {"tokens_per_second": 8192.0, "peak_gib": 50.0}
    full = {"side": "before", "out_of_memory": True}
    plain = {"before1": full, "after1": row}
    head, line, *cells = slices._speed({"runs": plain}, None)
    assert head.endswith("| peak memory, GiB |") and line == "|" + "---|" * 7
    assert cells[1].endswith("| 8192 | 50.00 |")
    graphs = {"before1": full, "before2": row, "after1": row | {"graph_pool_gib": 3.21}}
    head, line, *cells = slices._speed({"runs": graphs}, None)
    assert head.endswith("| peak memory, GiB | reserved for CUDA graphs, GiB |")
    assert line == "|" + "---|" * 8
    assert [each.count("|") for each in cells[:3]] == [9, 9, 9]
    assert cells[1].endswith("| 50.00 |  |") and cells[2].endswith("| 50.00 | 3.21 |")


def test_curves_state_the_pools_of_cuda_graphs() -> None:
    steps = [
        {"step": step, "tokens_per_second": 8192.0, "peak_gib": 50.0, "grad_norm": 1.0}
        | {"losses": {"lm loss": 11.0}, "graph_pool_gib": 3.2109375 if step > 3 else None}
        for step in range(1, 9)
    ]
    found = slices.curve(steps)
    assert found["graph_pool_gib"] == 3.21
    (text,) = slices._speed_of_curves({"runs": {"ours1": found}})
    assert text.endswith("(peak memory): ours1 8192 (50.0 GiB, CUDA graphs 3.2).")
    (text,) = slices._speed_of_curves({"runs": {"stock1": slices.curve([steps[0]])}})
    assert text.endswith("(peak memory): stock1 8192 (50.0 GiB).")


def test_a_ratio_has_the_spread_of_any_two_runs() -> None:
    middle, low, high = slices.ratio([130.0, 120.0], [100.0, 90.0])
    assert (middle, low, high) == pytest.approx((125 / 95, 1.2, 130 / 90))
    assert slices.ratio([], [1.0]) is None


def test_a_curve_that_ran_out_of_memory_is_not_judged() -> None:
    sides = {"stock": {"out_of_memory": True}, "again": {"losses": {}}, "ours": {"losses": {}}}
    runs = {f"{side}1": {"side": side, **run} for side, run in sides.items()}
    found = slices.report(INDEXER, {"curves_dense": {"stack": {}, "date": "", "runs": runs}}, {})
    assert "Not all curves have a result." in found


def test_a_part_that_does_not_exist_is_named(tmp_path: Path) -> None:
    words = [
        "indexer",
        "--site",
        "s",
        "--work",
        str(tmp_path),
        "--out",
        str(tmp_path),
        "--only",
        "fused9",
    ]
    done = CliRunner().invoke(slices.main, words)
    assert done.exit_code == 2 and "fused9: the parts are fused8, fused2" in done.output


def test_before_is_the_whole_overlay_but_for_the_named_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = turns(tmp_path)
    made.subject = dataclasses.replace(INDEXER, pages=("two",))
    del made.tree
    made.bench.tree = lambda name: tmp_path / name
    asked = []
    pages = {"after": ("one", "two", "six")}
    monkeypatch.setattr(slices.trees, "applied", lambda root: pages[root.name])
    monkeypatch.setattr(
        slices.trees, "apply", lambda root, *words, **_: asked.append((root.name, words[1::2]))
    )
    monkeypatch.setattr(slices.trees, "copy", lambda site, root: None)
    for side in ("before", "again"):
        made.tree(side)
    assert asked == [("before", ("one", "six")), ("stock", slices.REFERENCE)]
    made.subject = dataclasses.replace(INDEXER, pages=("no_such_page",))
    with pytest.raises(click.ClickException, match="no_such_page"):
        made.tree("before")


@pytest.mark.slow
@pytest.mark.megatron
def test_only_the_named_pages_are_applied(tmp_path: Path) -> None:
    pages = slices.trees.only(slices.REFERENCE)
    root = slices.trees.made(pristine("0.19.2"), tmp_path / "stock", *pages)
    assert set(slices.trees.applied(root)) == set(slices.REFERENCE)
