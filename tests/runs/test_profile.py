"""Profiles of runs: read, printed, compared and drawn; and no profiled step passes for another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from cppmega.cli.main import cli
from cppmega.errors import CppmegaError
from cppmega.launch.supervise import Supervisor
from cppmega.runs import compare, json_file, listing
from cppmega.runs import folder as run_folder
from cppmega.runs import profile as profiling
from cppmega.runs.folder import Run
from cppmega.runs.profile import SUMMARY, KernelTotal, KindTotal, Profile
from cppmega.training.step_profile import profile_of
from cppmega.training.trace import parse
from tests.runs.made import make
from tests.support.traces import MadeTrace

OPTIONS: dict[str, Any] = {"data": [], "tokenizer": None, "eod": None, "mock_data": False}


def made_profile() -> Profile:
    made = MadeTrace()
    made.steps(0, 1000, 2000)
    for start in (0, 1000):
        made.kernel("nvjet_tst_128x256", start + 100, start + 600, launch=(start + 50, start + 60))
        made.kernel("void own::strange<3>(int)", start + 700, start + 800)
        made.operator("SparseIndexerKLLoss", start + 600, start + 680)
    return profile_of(
        parse(made.data()), 11, recipe="slice", overlay="d1g", megatron="0.19.2",
        versions={"torch": "2.11.0"}, unprofiled_step_ms=0.9,
    )  # fmt: skip


def profiled_run(runs: Path, name: str, profile: Profile | None = None) -> Run:
    run = make(runs, name, 1, options={**OPTIONS, "profile": 2})
    if profile is not None:
        run.profile.mkdir()
        json_file.write(run.profile / SUMMARY, json_file.plain(profile))
    return run


def test_the_table_says_where_the_step_went() -> None:
    text = "\n".join(profiling.lines(made_profile()))
    assert "profile of slice, steps 11 to 12, rank 0 of 1, NVIDIA H200" in text
    assert "step 1.0 ms (0.9 without the profiler): busy 0.6, waiting 0.4 (40.0 %)" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["products", "0.5", "50.0", "%", "1", "nvjet_tst_128x256", "0.5"] in rows
    assert ["waiting", "0.4", "40.0", "%"] in rows
    assert ["0.1", "1", "x", "strange", "other"] in rows
    assert "0.10 ms, 1 x void own::strange<3>(int)" in text, "what no rule knows is named"
    assert "1 gaps  SparseIndexerKLLoss" in text
    assert "after strange: Python between operators" in text


def test_a_run_without_a_profile_says_how_to_make_one(tmp_path: Path) -> None:
    run = profiled_run(tmp_path, "one")
    with pytest.raises(CppmegaError, match="no-profile"):
        profiling.read(run)
    run.profile.mkdir()
    for text in ('{"schema": 1}', '{"schema": 9', ""):
        (run.profile / SUMMARY).write_text(text)
        with pytest.raises(CppmegaError, match="no-profile"):
            profiling.read(run)
    json_file.write(run.profile / SUMMARY, json_file.plain(made_profile()))
    assert profiling.read(run) == made_profile()


def test_the_command_prints_the_table_and_the_json(tmp_path: Path) -> None:
    profiled_run(tmp_path, "one", made_profile())
    shown = CliRunner().invoke(cli, ["profile", "one", "--runs", str(tmp_path)])
    assert shown.exit_code == 0 and "profile of slice" in shown.output
    read = CliRunner().invoke(cli, ["profile", "--json", "--runs", str(tmp_path)])
    answer = json.loads(read.output)
    assert (answer["ok"], answer["schema"], answer["waiting_share"]) == (True, 1, 0.4)
    assert sum(kind["ms"] for kind in answer["kinds"]) == pytest.approx(answer["busy_ms"])


def test_two_profiles_side_by_side(tmp_path: Path) -> None:
    a = made_profile()
    copies = KindTotal(
        kind="copies", ms=0.25, share=0.25, summed_ms=0.25, launches=7,
        kernels=(KernelTotal(name="k", ms=0.25, launches=7),),
    )  # fmt: skip
    b = msgspec.structs.replace(a, kinds=(*a.kinds[:1], copies), waiting_ms=0.15)
    one, other = profiled_run(tmp_path, "a", a), profiled_run(tmp_path, "b", b)
    lines = list(profiling.of_both(one, other))
    rows = {line.split("  ")[0].strip(): line.split() for line in lines}
    assert rows["copies"][1:] == ["0.0", "0.2", "+0.2", "7"]
    assert rows["waiting"][1:4] == ["0.4", "0.1", "-0.2"]
    assert list(profiling.of_both(one, profiled_run(tmp_path, "c"))) == []
    shown = CliRunner().invoke(cli, ["compare", "a", "b", "--runs", str(tmp_path)])
    assert "profiles, per step" in shown.output and "2 steps profiled" in shown.output


def test_profiled_steps_are_left_out_of_the_throughput(tmp_path: Path) -> None:
    run = profiled_run(tmp_path, "one")
    rows = [
        {"step": step, "seconds": 1.0, "tokens_per_second": 100.0, "profiled": False}
        for step in range(1, 9)
    ]
    rows[5] |= {"seconds": 10.0, "tokens_per_second": 10.0, "profiled": True}
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert compare.compare(run, run).tokens_per_second == (100.0, 100.0)


def test_a_profiled_run_says_so_where_it_is_listed(tmp_path: Path) -> None:
    run = profiled_run(tmp_path, "one")
    row = listing.row_of(run)
    assert row.profiled_steps == 2
    assert "profiled: 2 steps, see cppmega profile one" in "\n".join(listing.table([row]))
    node = run_folder.claim_node(run, 1)
    assert node is not None
    assert Supervisor(node).status.profiled_steps == 2
    other = make(tmp_path, "two", 1)
    assert other.profiled_steps == 0
    plain = run_folder.claim_node(other, 1)
    assert plain is not None
    assert "profiled" not in json.dumps(json_file.plain(Supervisor(plain).status))


def test_a_folder_named_on_the_command_line_is_found(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    options = {**OPTIONS, "profile": 2, "profile_folder": str(elsewhere)}
    run = make(tmp_path, "one", 1, options=options)
    elsewhere.mkdir()
    json_file.write(elsewhere / SUMMARY, json_file.plain(made_profile()))
    assert profiling.read(run) == made_profile()
