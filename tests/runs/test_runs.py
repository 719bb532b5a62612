"""Run folders, what is said of overlays, and two runs side by side: all without a process."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import fields, replace
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import UNSET, structs

from cppmega.catalogue import gates
from cppmega.checkpoints.tracker import TRACKER
from cppmega.cli import main
from cppmega.errors import CppmegaError
from cppmega.host import process, redact
from cppmega.launch import agent, start
from cppmega.launch import folder as launch_folder
from cppmega.launch import prepare as launch
from cppmega.launch import record as launch_record
from cppmega.launch.request import LaunchRequest, ValidatedLaunch
from cppmega.overlay import receipt
from cppmega.overlay import record as overlay_record
from cppmega.overlay.receipt import PatchedPage, Receipt
from cppmega.overlay.record import OverlayRecord
from cppmega.preflight.context import Context
from cppmega.recipe import index as recipes_index
from cppmega.recipe.run_options import RunOptions
from cppmega.runs import compare, json_file, listing, liveness, logs, tmux
from cppmega.runs import control as run_control
from cppmega.runs import folder as run_folder
from cppmega.runs.folder import Run
from cppmega.runs.manifest import DataRecord
from cppmega.runs.metrics import LoggedStep
from cppmega.runs.status import Failure, Status
from cppmega.training import data_requirements
from cppmega.training import options as trainer_options
from cppmega.tree import accepted
from tests.support import REPOSITORY, pristine
from tests.support.lab import Lab

Page = tuple[str, str]


def record(digest: str, gates: dict[str, str] | None = None, **pages: Page) -> OverlayRecord:
    """As `overlay_record.record_of` makes it; a page is (revision, text)."""
    receipt = Receipt(digest=digest, megatron="0.19.2", gates=gates or {})
    for name, (revision, text) in pages.items():
        targets = {"megatron/core/a.py:f": {"before": "x", "after": text}}
        receipt.pages[name] = PatchedPage(revision, "applied", "source", targets)
    return overlay_record.record_of(receipt)


def test_accepted_edits_belong_to_the_name_of_the_code() -> None:
    path, receipt = "megatron/core/x.py", Receipt(digest="aaaa", megatron="0.19.2")
    plain, edited = (overlay_record.record_of(receipt, edits) for edits in ({}, {path: "1" * 64}))
    again = overlay_record.record_of(receipt, {path: "2" * 64})
    assert plain.digest == "aaaa" and edited.digest.startswith("aaaa+edits:")
    assert edited.digest != again.digest and edited.edits == {path: "1" * 64}
    assert overlay_record.differences(plain, edited) == [
        f"accepted edit of {path}: none -> {'1' * 12}"
    ]


def test_what_differs_between_two_overlays() -> None:
    then = record("aaaa", {"CPPMEGA_X": "0"}, one=("1", "t"), two=("1", "t"), three=("1", "t"))
    now = record("bbbb", {"CPPMEGA_X": "1"}, two=("2", "u"), three=("1", "u"), four=("1", "t"))
    assert overlay_record.differences(then, now) == [
        "patch added: four",
        "patch removed: one",
        "patch changed: three (same page on another text of Megatron)",
        "patch changed: two (revision 1 -> 2)",
        "gate CPPMEGA_X: 0 -> 1",
    ]
    assert overlay_record.differences(then, then) == []
    older = structs.replace(then, digest="cccc", megatron="0.18.2")
    assert overlay_record.differences(older, then) == ["megatron-core 0.18.2 -> 0.19.2"]


def test_a_changed_kernel_is_named() -> None:
    then = structs.replace(record("aaaa"), code={"cppmega.ops.k": "1"})
    now = structs.replace(record("bbbb"), code={"cppmega.ops.k": "2", "cppmega.new": "1"})
    assert overlay_record.differences(then, now) == ["code changed: cppmega.ops.k"]


def test_a_record_of_an_earlier_kind_is_compared_as_far_as_it_goes() -> None:
    """Runs and checkpoints made when the digest left the kernels out: one sentence says it."""
    then = structs.replace(record("aaaa", one=("1", "t"), two=("1", "t")), code=UNSET)
    same, other = record("bbbb", one=("2", "t"), two=("2", "t")), record("bbbb", one=("2", "u"))
    (said,) = overlay_record.differences(then, same)
    assert "earlier cppmega" in said and "kernels" in said
    assert overlay_record.differences(then, other)[1:] == [
        "patch removed: two",
        "patch changed: one (same page on another text of Megatron)",
    ]


def test_what_a_checkpoint_says_of_its_overlay() -> None:
    then, now = record("aaaa", one=("1", "t")), record("bbbb")
    kept = overlay_record.parse(overlay_record.dump(then))
    assert kept == then
    line = overlay_record.remark_on_checkpoint(kept, now)
    assert "saved under overlay aaaa, this run has bbbb: patch removed: one" in line
    assert overlay_record.remark_on_checkpoint(kept, then) == ""
    for odd in (None, "", "[]", "{}", "{"):
        assert overlay_record.parse(odd) is None
    assert "does not record" in overlay_record.remark_on_checkpoint(None, now)
    assert overlay_record.record_of(Receipt()).digest == overlay_record.NONE


def test_megatron_tells_the_overlay_of_a_checkpoint_that_it_loads(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cppmega.training.pretrain import comparing_overlays

    seen: list[Any] = []
    check = comparing_overlays(lambda saved, **more: seen.append((saved, more)), record("bbbb"))
    saved = SimpleNamespace(cppmega_patches=overlay_record.dump(record("aaaa", one=("1", "t"))))
    check(saved, skip_args={"x"})
    assert "patch removed: one" in capsys.readouterr().out
    assert seen == [(saved, {"skip_args": {"x"}})]  # Megatron's own check goes on
    monkeypatch.setenv("CPPMEGA_DSA_DENSE_LOSS_STEPS", "3")
    check(SimpleNamespace(**vars(saved), cppmega_dsa_dense_loss_steps=2))
    assert "first 2 steps, this run has it in the first 3" in capsys.readouterr().out
    check(SimpleNamespace(**vars(saved), cppmega_dsa_dense_loss_steps=3))
    assert "dense loss" not in capsys.readouterr().out


def make(runs: Path, name: str, created: float, **manifest: Any) -> Run:
    """A run folder that some launch made."""
    run = run_folder.create(runs, name)
    whole = {
        "created": created,
        "nodes": 1,
        "nproc": 2,
        "recipe": {"name": "smoke_cpu", "sha256": "abc", "changes": []},
        "overlay": record("aaaa", one=("1", "t")),
        "megatron": {"version": "0.19.2"},
        "arguments": [],
        "options": {"data": [], "tokenizer": None, "eod": None, "mock_data": False},
        "environment": {"NCCL_DEBUG": "INFO"},
        "stack": {"torch": "2.11.0"},
        "data": {"paths": ["d"], "fingerprint": "f", "mock": False},
        **manifest,
    }
    whole["options"].setdefault("data_cache", None)
    json_file.write(run.manifest_file, json_file.plain(whole))
    return run


def ended(run: Run, code: int, **more: Any) -> None:
    node = run_folder.claim_node(run, 9)
    assert node is not None
    node.write(Status(host="h", ended=time.time(), exit=code, **more))


def test_runs_are_found_by_name_session_beginning_and_folder(tmp_path: Path) -> None:
    with pytest.raises(CppmegaError, match="no-runs"):
        run_folder.find(tmp_path, None)
    old = make(tmp_path, "big-1", 1, tmux="demo")
    new = make(tmp_path, "big-2", 2, tmux="demo")
    (tmp_path / "data").mkdir()  # no run
    assert run_folder.everyone(tmp_path) == [new, old]
    found = {name: run_folder.find(tmp_path, name) for name in (None, "big-1", "demo")}
    assert found == {None: new, "big-1": old, "demo": new}
    assert run_folder.find(Path("elsewhere"), str(old.path)) == old
    for name, error in (("big", "run-ambiguous"), ("small", "run-unknown")):
        with pytest.raises(CppmegaError, match=error):
            run_folder.find(tmp_path, name)
    with pytest.raises(CppmegaError, match="run-exists"):
        run_folder.create(tmp_path, "big-1")
    for name in ("", "a b", "-x", ".x", "a/b", "../x"):
        with pytest.raises(CppmegaError, match="bad-run-name"):
            run_folder.create(tmp_path, name)
    assert run_folder.fresh_name(tmp_path, "r") != "r"


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"created": 1, "na',
        "[1]",
        '{"schema": 9}',
        '{"created": "yesterday"}',
        '{"created": 1, "recipe": "x"}',
        "\x00\x80",
    ],
)
def test_one_damaged_folder_does_not_take_down_the_others(tmp_path: Path, text: str) -> None:
    whole, damaged = make(tmp_path, "whole", 2), make(tmp_path, "damaged", 3)
    for run in (whole, damaged):
        ended(run, 0)
    damaged.manifest_file.write_text(text, encoding="latin-1")
    runs = run_folder.everyone(tmp_path)
    lines = list(listing.table([listing.row_of(run) for run in runs]))
    assert sum("manifest.json" in line for line in lines) == 1
    found = run_folder.find(tmp_path, "damaged")
    assert listing.row_of(found).seconds is None
    for wants_it in (
        lambda: compare.compare(whole, found),
        lambda: logs.show(found, rank=0, follow=False),
        lambda: launch.prepare(asked(tmp_path, resume="damaged")),
    ):
        with pytest.raises(CppmegaError, match="run-damaged") as damage:
            wants_it()
        assert ("upgrade cppmega" in str(damage.value)) == ("schema" in text)


def test_a_status_and_metrics_that_are_damaged(tmp_path: Path) -> None:
    run = make(tmp_path, "run", 1)
    ended(run, 0)
    row = {"step": 1, "loss": 1.0, "seconds": 1.0, "tokens_per_second": 1.0}
    run.metrics.write_bytes(json.dumps(row).encode() + b'\n\xff\xfe\n{"step": \n3\n')
    step = LoggedStep(**row)
    assert run.steps() == [step] and run.last_step() == step
    (node,) = run.nodes()
    node.status_file.write_text('{"pid": "x", "ended": "yesterday"}')
    assert node.status() is None and listing.row_of(run).state == "starting"


def test_a_run_that_was_moved_has_its_curves_and_checkpoints(tmp_path: Path) -> None:
    places = {"save": str(tmp_path / "old" / "checkpoints"), "metrics": str(tmp_path / "old" / "m")}
    run = make(tmp_path, "old", 1, **places)
    run.metrics.write_text('{"step": 3}\n')
    (run.path / "checkpoints").mkdir()
    (run.path / "checkpoints" / TRACKER).write_text("3")
    run.path.rename(tmp_path / "new")
    moved = run_folder.find(tmp_path, "new")
    assert (moved.last_step(), moved.checkpoint()) == (LoggedStep(step=3), 3)


def test_no_name_is_no_beginning_of_one(tmp_path: Path) -> None:
    """`cppmega stop "$UNSET"` must not stop the only run."""
    make(tmp_path, "only", 1)
    with pytest.raises(CppmegaError, match="run-unknown") as caught:
        run_folder.find(tmp_path, "")
    assert caught.value.next == f"cppmega runs --runs {tmp_path}"
    (run,) = run_folder.everyone(tmp_path)
    assert run_folder.find(Path("elsewhere"), run.word) == run


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CppmegaError, match="runs-not-writable"):
        run_folder.create(tmp_path / "file", "run")


def test_the_variable_names_the_folder_and_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CPPMEGA_RUNS", raising=False)
    assert run_folder.root() == Path("runs")
    monkeypatch.setenv("CPPMEGA_RUNS", "/elsewhere")
    assert run_folder.root() == Path("/elsewhere")
    assert run_folder.root(Path("given")) == Path("given")
    gates.check([], {"CPPMEGA_RUNS": "/elsewhere", "CPPMEGA_RUN": "/elsewhere/one"})


def test_one_word_for_every_end(tmp_path: Path) -> None:
    term = Failure(rank=0, local_rank=0, signal="SIGTERM", exit=-15, message="")
    broken = Failure(rank=1, local_rank=1, exit=1, message="x")
    for name, code, more, state in (
        ("a", 0, {}, "finished"),
        ("b", 0, {"stop": "checkpoint"}, "stopped"),
        ("c", 1, {"stop": "checkpoint", "failure": term}, "stopped"),  # before its first step
        ("d", 1, {"stop": "checkpoint", "failure": broken}, "crashed"),  # while it was saving
        ("e", 1, {"stop": "now"}, "stopped"),
        ("f", 1, {"failure": broken}, "crashed"),
    ):
        run = make(tmp_path, name, 1)
        ended(run, code, **more)
        assert (run.state(), run.exit()) == (state, code), name
    pair = make(tmp_path, "pair", 1, nodes=2)
    ended(pair, 0)
    ended(pair, 1, failure=broken)
    assert (pair.state(), pair.exit()) == ("crashed", 1)


def test_a_run_that_ends_while_it_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is gone when it is looked for, and the status that was read is out of date."""
    me = {"pid": os.getpid(), "since": process.started(os.getpid()), "boot": process.boot()}
    live = Status(**me, host=socket.gethostname(), stop="checkpoint")

    def ending_at(look: int, name: str) -> Run:
        """A run that is alive when it is looked at before."""
        run = make(tmp_path, name, 1)
        node = run_folder.claim_node(run, 1)
        assert node is not None
        node.write(live)
        looks = itertools.count(1)

        def in_charge(status: Status) -> bool:
            alive = next(looks) < look
            if not alive:
                node.write(structs.replace(live, ended=time.time(), exit=0))
            return alive

        monkeypatch.setattr(liveness, "in_charge", in_charge)
        return run

    assert ending_at(1, "one").state() == "stopped"
    with pytest.raises(CppmegaError, match="run-ended: two is stopped"):
        run_control.stop(ending_at(2, "two"), now=False, wait=1)


def test_a_reader_that_stops_in_the_middle_does_not_keep_the_lock_of_a_run(tmp_path: Path) -> None:
    """It is stopped while it asks whether the lock is held; the run is not without one for that."""
    file = tmp_path / "console.log"
    file.touch()
    ask = (
        "import fcntl, sys; file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_SH);"
        "print(1, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", ask, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdin is not None and reader.stdout is not None
        reader.stdout.readline()
        leave = threading.Timer(0.5, reader.stdin.close)
        leave.start()
        with FileIO(file, "a") as console:
            liveness.hold(console)
            assert liveness.held(file)
        leave.join()


def test_a_process_of_before_the_reboot_or_of_the_same_number(tmp_path: Path) -> None:
    run = make(tmp_path, "run", 1)
    node = run_folder.claim_node(run, 1)
    assert node is not None
    me = {"pid": os.getpid(), "since": process.started(os.getpid()), "boot": process.boot()}
    mine = Status(**me, host=socket.gethostname())
    node.write(mine)
    assert run.state() == "running"
    node.write(structs.replace(mine, stop="checkpoint"))
    assert run.state() == "stopping"
    for wrong in ({"since": "1"}, {"boot": "another"}, {"pid": 2**22 + 1}):
        node.write(structs.replace(mine, **wrong))
        assert run.state() == "killed", wrong
    node.write(structs.replace(mine, host="another", since="1"))
    assert run.state() == "running"  # nothing can be said from here
    with pytest.raises(CppmegaError, match="run-elsewhere"):
        run_control.stop(run, now=False, wait=1)
    with pytest.raises(CppmegaError, match="run-elsewhere"):
        run_control.attach(run)


def test_a_second_stop_finds_what_the_first_has_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(tmp_path, "run", 1)
    node = run_folder.claim_node(run, 1)
    assert node is not None
    me = {"pid": os.getpid(), "since": process.started(os.getpid()), "boot": process.boot()}
    status = Status(**me, host=socket.gethostname(), stop="checkpoint")
    node.write(status)
    run.checkpoints.mkdir()
    (run.checkpoints / TRACKER).write_text("5")
    run.metrics.write_text('{"step": 5}\n')
    over = structs.replace(status, ended=time.time(), exit=0)
    monkeypatch.setattr(process, "send", lambda *_: node.write(over))
    run_control.stop(run, now=False, wait=9)
    assert capsys.readouterr().out == "stopped run, checkpoint of step 5\n"
    node.write(status)
    run.metrics.write_text('{"step": 6}\n')
    with pytest.raises(CppmegaError, match="not-saved"):
        run_control.stop(run, now=False, wait=9)


def test_a_shell_in_a_folder_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(SystemExit) as ended_:
        main(["launch", "smoke_cpu"])
    assert ended_.value.code == 1 and "folder-gone" in capsys.readouterr().err


def test_the_first_failure_is_told_by_the_exact_time(tmp_path: Path) -> None:
    failures = {}
    for rank, at in ((0, 100.9), (1, 100.2)):
        file = tmp_path / f"{rank}.json"
        said = {"message": f"m{rank}", "extraInfo": {"py_callstack": f"trace {rank}", "time": at}}
        file.write_text(json.dumps({"message": said}))
        failures[rank] = SimpleNamespace(
            error_file=str(file), timestamp=100, local_rank=rank, exitcode=1
        )
    first = agent.first(failures)
    assert (first.rank, first.message, first.others) == (1, "trace 1", (0,))


@pytest.mark.parametrize(("seen", "first"), [(101, 1), (131, 0)])
def test_a_killed_rank_fails_before_the_error_that_it_causes(
    tmp_path: Path, seen: int, first: int
) -> None:
    """Torchrun sees the end of a killed rank late, and kills a rank itself after thirty seconds."""
    file = tmp_path / "0.json"
    details = {"py_callstack": "connection reset by peer", "time": 100.9}
    file.write_text(json.dumps({"message": {"message": "", "extraInfo": details}}))
    failures = {
        0: SimpleNamespace(error_file=str(file), timestamp=100, local_rank=0, exitcode=1),
        1: SimpleNamespace(
            error_file=str(tmp_path / "none.json"),
            timestamp=seen,
            local_rank=1,
            exitcode=-signal.SIGKILL,
            signal_name=lambda: "SIGKILL",
        ),
    }
    assert agent.first(failures).rank == first


def test_two_runs_side_by_side(tmp_path: Path) -> None:
    argv = ["--lr", "1", "--flag", "--save", "here", "--hybrid-layer-pattern=-E"]
    one = make(tmp_path, "one", 1, arguments=argv)
    two = make(
        tmp_path,
        "two",
        2,
        arguments=["--lr", "2", "--save", "there", "--hybrid-layer-pattern=-E", "--new", "a", "b"],
        overlay=record("bbbb"),
        stack={"torch": "2.12.0", "triton": "3.6.0"},
        environment={},
        data={"paths": ["e"], "fingerprint": "g", "mock": True},
        recipe={"name": "smoke_cpu", "sha256": "abd", "changes": ["lr=2"]},
        nproc=4,
    )
    for run, offset in ((one, 0), (two, 2)):
        rows = [
            {"step": s, "loss": 5 - s / 100, "seconds": 1.0, "tokens_per_second": 100.0 + offset}
            for s in range(1 + offset, 41 + offset)
        ]
        header = {"start": "smoke_cpu", "data": {"one": "f", "two": "h"}[run.name]}
        run.metrics.write_text("".join(json.dumps(row) + "\n" for row in [header, *rows]) + '{"st')
        assert run.last_step() == LoggedStep(**rows[-1])
    found = compare.compare(one, two)
    assert found.overlay == ["patch removed: one"]
    assert found.arguments == [
        "--flag: given | not given",
        "--lr: 1 | 2",
        "--new: not given | a b",
        "nproc: 2 | 4",
    ]
    assert found.stack == ["torch: 2.11.0 | 2.12.0", "triton: not there | 3.6.0"]
    assert found.environment == ["NCCL_DEBUG: INFO | not there"]
    assert found.data[:2] == ["mock data: False | True", "fingerprint: f | h"]  # the ranks' own
    text, changes = found.recipe
    assert text == "text of the recipe file: abc | abd"
    assert changes == "changed with --set: nothing | lr=2"
    assert (found.common_steps, found.largest_loss_difference) == (38, 0)
    assert found.tokens_per_second == (100, 102)
    text = "\n".join(compare.lines(found))
    assert "bitwise equal" in text and "(+2.0 %)" in text and "MOCK DATA" in text
    shown = [int(x.split()[0]) for x in text.splitlines() if x.strip()[:1].isdigit()]
    assert shown[0] == 1 and shown[-2] == 42 and len(shown) == 21  # twenty, and the verdict
    same = compare.compare(one, one)
    assert not any(
        getattr(same, part) for part in ("overlay", "arguments", "stack", "data", "recipe")
    )


def test_held_out_losses_are_listed_and_compared(tmp_path: Path) -> None:
    runs = []
    for name, loss, data in (("one", 5.0, "f"), ("two", 4.5, "g")):
        run = make(tmp_path, name, 1)
        header = {"start": "smoke_cpu", "data": "d", "held_out": data}
        losses = {"lm loss": loss, "mtp_1 loss": loss + 1}
        rows = [
            {"step": step, "loss": loss, "seconds": 1.0, "tokens_per_second": 1.0}
            for step in range(1, 5)
        ]
        evaluations = [{"evaluated": step, "losses": losses, "tokens": 8} for step in (2, 4)]
        written = [header, *rows, *evaluations[: len(runs) + 1]]
        run.metrics.write_text("".join(json.dumps(row) + "\n" for row in written))
        runs.append(run)
    found = compare.compare(*runs)
    assert [(pair.step, pair.name, pair.loss) for pair in found.held_out] == [
        (2, "lm loss", (5.0, 4.5)),
        (2, "mtp_1 loss", (6.0, 5.5)),
        (4, "lm loss", (None, 4.5)),
        (4, "mtp_1 loss", (None, 5.5)),
    ]
    assert "held-out fingerprint: f | g" in found.data
    shown = [line.split() for line in compare.lines(found)]
    assert ["2", "6.00000", "5.50000", "-5.00e-01", "mtp_1", "loss"] in shown
    row = listing.row_of(runs[1])
    assert row.held_out and row.held_out.evaluated == 4 and row.step == 4
    table = list(listing.table([row]))
    assert table[-1].strip() == "held out after step 4: lm loss 4.5000, mtp_1 loss 5.5000"


def test_losses_that_are_no_numbers_are_a_difference(tmp_path: Path) -> None:
    runs = []
    for name, loss in (("one", 1.0), ("two", float("nan"))):
        run = make(tmp_path, name, 1)
        row = {"step": 1, "loss": loss, "seconds": 1.0, "tokens_per_second": 1.0}
        run.metrics.write_text(json.dumps(row) + "\n")
        runs.append(run)
    assert str(compare.compare(*runs).largest_loss_difference) == "nan"
    assert "equal" not in "\n".join(compare.lines(compare.compare(*runs)))


def asked(runs: Path, **how: Any) -> LaunchRequest:
    """A launch as the command line makes it."""
    names = {field.name for field in fields(RunOptions)}
    options = RunOptions(**{name: how.pop(name) for name in list(how) if name in names})
    return LaunchRequest(recipe=how.pop("recipe", "smoke_cpu"), options=options, runs=runs, **how)


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ({"recipe": "smoke_cpv"}, "recipe-unknown"),
        ({"tmux": "a.b"}, "bad-session-name"),
        ({"tmux": "a#(touch hacked)"}, "bad-session-name"),
        ({"tmux": "#{host}"}, "bad-session-name"),
        ({"tmux": "-x"}, "bad-session-name"),
        ({"tmux": "a;kill-server"}, "bad-session-name"),
        ({"tmux": "läuft"}, "bad-session-name"),
        ({"name": "a b"}, "bad-run-name"),
        ({"nodes": 2}, "no-rendezvous"),
        ({"nodes": 2, "rdzv": "h:1"}, "no-rendezvous"),
        ({"recipe": "nam56r_h200_8gpu_bf16", "nodes": 3}, "wrong-world-size"),
        ({"recipe": "nam56r_h200_slice", "nproc": 2}, "wrong-world-size"),
        ({"resume": "nothing"}, "no-runs"),
        ({"rdzv": "h:1"}, "rendezvous-of-one"),
        ({"profile": 2, "profile_after": 199}, "profile-beyond-run"),
        ({"changes": ("name=mine",)}, "bad-assignment"),
        ({"changes": ("lr=1e999",)}, "recipe-invalid"),
        ({"changes": ("lr=-1",)}, "recipe-invalid"),
        ({"changes": ("seed=-1",)}, "recipe-invalid"),
        ({"changes": ("lrr=1",)}, "unknown-field"),
    ],
)
def test_a_launch_that_cannot_be_is_refused_before_anything_is_looked_at(
    how: dict[str, Any], error: str, tmp_path: Path
) -> None:
    with pytest.raises(CppmegaError, match=error):
        launch.prepare(asked(tmp_path / "runs", **how))
    assert not (tmp_path / "runs").exists()


def test_only_an_ended_run_with_a_checkpoint_is_resumed(tmp_path: Path) -> None:
    make(tmp_path, "fresh", 1)
    with pytest.raises(CppmegaError, match="run-still-running"):
        launch.prepare(asked(tmp_path, resume="fresh"))
    run = make(tmp_path, "crashed", 2)
    ended(run, 1)
    with pytest.raises(CppmegaError, match="nothing-to-resume") as caught:
        launch.prepare(asked(tmp_path, resume="crashed"))
    assert "fresh start" in caught.value.next
    json_file.write(run.manifest_file, {**json_file.plain(run.manifest), "resumes": "earlier"})
    with pytest.raises(CppmegaError, match="nothing-to-resume") as caught:
        launch.prepare(asked(tmp_path, resume="crashed"))
    assert "--resume earlier" in caught.value.next
    run.checkpoints.mkdir()
    (run.checkpoints / TRACKER).write_text("200")
    with pytest.raises(CppmegaError, match="already-trained") as caught:
        launch.prepare(asked(tmp_path, resume="crashed"))
    assert "train_iters=400" in caught.value.next
    (run.path / "recipe").mkdir()
    shutil.copy(recipes_index.folder() / "smoke_cpu.py", run.path / "recipe")
    with pytest.raises(CppmegaError, match="run-of-another-model") as caught:
        launch.prepare(asked(tmp_path, resume="crashed", changes=("hidden_size=128",)))
    assert "hidden_size 64 and 128" in caught.value.what
    with pytest.raises(CppmegaError, match="run-of-another-recipe"):
        launch.prepare(asked(tmp_path, resume="crashed", recipe="nam56r_h200_slice"))


@pytest.mark.parametrize(
    ("how", "error"),
    [({"nproc": 3}, "wrong-world-size"), ({"mock_data": True}, "not-supported")],
)
def test_what_the_loop_cannot_do_is_refused_before_it_starts(
    how: dict[str, Any], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CppmegaError, match=error), monkeypatch.context() as patched:
        patched.setattr(launch, "_examined", lambda *_: pytest.fail("it took a minute"))
        launch.prepare(asked(tmp_path / "runs", **how))
    monkeypatch.setattr(launch, "_examined", lambda *_: {})
    assert launch.prepare(asked(tmp_path / "runs")).options.load is None
    assert not (tmp_path / "runs").exists()
    # A folder of one's own that has checkpoints is gone on from, and the manifest says so.
    (tmp_path / TRACKER).write_text("7")
    again = launch.prepare(asked(tmp_path / "runs", save=tmp_path))
    assert again.options.load == again.options.save == tmp_path


def test_what_the_preflight_has_found_is_not_sought_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One data check, one receipt and one set of options for preflight, manifest and torchrun."""
    calls: list[str] = []

    def counted(module: Any, name: str) -> None:
        original = getattr(module, name)

        def call(*args: Any, **more: Any) -> Any:
            calls.append(name)
            return original(*args, **more)

        monkeypatch.setattr(module, name, call)

    def checks(context: Context, recipe: str) -> dict[str, str]:
        assert context.data and context.receipt and context.accepted == {}
        assert sorted(set(calls)) == ["check", "load", "merged"]
        calls.clear()
        return {"data": "ok"}

    monkeypatch.setattr(launch, "_examined", checks)
    for module, name in (
        (data_requirements, "check"),
        (receipt, "load"),
        (accepted, "merged"),
        (trainer_options, "read"),
    ):
        counted(module, name)
    how = {"recipe": "dsv32_h200_slice", "mock_data": True, "root": pristine("0.19.2")}
    validated = launch.prepare(asked(tmp_path / "runs", **how))
    run = launch_folder.create(validated).run
    assert calls == []
    assert run.manifest.options == validated.context.options
    words = [*validated.torchrun, "--megatron", str(how["root"])]
    words = words[words.index("cppmega.trainer") + 2 :]
    monkeypatch.undo()
    assert trainer_options.read(words) == (validated.options, ())


def test_without_tmux_it_says_how_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CppmegaError, match="no-tmux") as caught:
        launch.prepare(asked(tmp_path, tmux="demo"))
    assert "leave --tmux out" in caught.value.next
    assert not tmux.exists("demo")


def test_the_line_of_a_recipe_for_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as this machine can say it: the preflight would miss the GPU."""
    root = pristine("0.19.2")
    monkeypatch.setattr(launch, "_examined", lambda *_: {})
    alone = launch.prepare(
        asked(tmp_path / "runs", recipe="dsv32_h200_slice", mock_data=True, root=root)
    )
    # Where the host's own name has no address, torchrun would wait for ever.
    assert alone.torchrun[:3] == ("--standalone", "--local-addr", "127.0.0.1")
    how = {"recipe": "dsv32_h200_slice", "mock_data": True, "root": root}
    changes = ("gpus=4", "global_batch_size=4", "expert_model_parallel_size=4")
    made = launch.prepare(
        asked(
            tmp_path / "runs",
            **{**how, "changes": changes, "nodes": 2, "rdzv": "first:29500", "name": "both"},
            arguments=("--log-params-norm",),
        )
    )
    folder, line = tmp_path / "runs" / "both", " ".join(made.torchrun)
    assert line.startswith(
        "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint first:29500 --rdzv-id both "
        f"--nproc-per-node 2 --redirects 3 --tee 0:3,1:3 -m cppmega.run --megatron {root} "
        f"-m cppmega.trainer {folder}/recipe/dsv32_h200_slice.py "
    )
    assert " --set gpus=4 " in line and " --mock-data " in line
    assert f"--save {folder}/checkpoints" in line and f"--metrics {folder}/metrics.jsonl" in line
    assert "--profile-folder" not in line, "nothing is profiled"
    assert line.endswith(" -- --log-params-norm")
    assert "--exit-signal-handler" in made.argv  # what `stop` relies on
    assert made.argv[-1] == "--log-params-norm"
    at = made.argv.index("--rerun-mode")
    assert made.argv[at + 1] == "disabled"
    assert made.data.mock and made.environment["PYTORCH_CUDA_ALLOC_CONF"]
    assert not folder.exists()


def ready(lab: Lab, **how: Any) -> ValidatedLaunch:
    """A launch that has passed every check."""
    recipe = recipes_index.load("smoke_cpu")
    context = Context(
        root=lab.root,
        recipe=recipe,
        options=RunOptions(save=Path("/s")),
        environ={"NCCL_DEBUG": "1", "WANDB_api_key": "secret", "SLURM_JWT": "secret"},
    )
    context.session = lab.session()
    return ValidatedLaunch(
        request=asked(lab.root.parent / "runs", **how),
        recipe=recipe,
        context=context,
        folder=lab.root.parent / "runs" / "made",
        nproc=1,
        torchrun=("--standalone",),
        argv=("--lr", "1", "--hf-token", "secret", "--data-path", "http://me:secret@host/d"),
        data=DataRecord(fingerprint="f"),
    )


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    made = Lab(tmp_path, monkeypatch)
    made.wheel()
    made.page()
    made.apply()
    return made


def test_the_folder_says_what_was_launched_and_is_made_once(lab: Lab) -> None:
    one = ready(lab)
    run = launch_folder.create(one).run
    manifest = run.manifest
    assert manifest.overlay.digest == lab.receipt().digest
    assert list(manifest.overlay.pages or ()) == ["page"]
    assert json.loads((run.path / "receipt.json").read_text())["digest"] == lab.receipt().digest
    assert manifest.environment == {"NCCL_DEBUG": "1"}  # and no secret
    assert manifest.arguments[-1] == "http://(not recorded)@host/d"
    assert manifest.recipe.git and manifest.recipe.git.commit
    assert manifest.cppmega.git and manifest.cppmega.git.commit
    assert "secret" not in run.manifest_file.read_text()
    with pytest.raises(CppmegaError, match="run-exists"):
        launch_folder.create(one)
    # Several hosts: each joins once, with the same launch.
    pair = ready(lab, nodes=2, name="pair", rdzv="h:1")
    pair = replace(pair, folder=pair.folder.with_name("pair"))
    assert [launch_folder.create(pair).path.name for _ in range(2)] == ["0", "1"]
    with pytest.raises(CppmegaError, match="run-exists"):
        launch_folder.create(pair)
    with pytest.raises(CppmegaError, match="launch-differs"):
        launch_folder.create(replace(pair, argv=("--lr", "2")))


def test_a_folder_that_cannot_be_filled_is_not_left_behind(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json_file, "write", full)
    with pytest.raises(CppmegaError, match=r"run-folder-not-written: .*No space left"):
        launch_folder.create(ready(lab))
    assert list((lab.root.parent / "runs").iterdir()) == []
    (lab.root.parent / "runs" / "made").symlink_to(lab.root / "nowhere")
    with pytest.raises(CppmegaError, match="run-exists"):
        launch_folder.create(ready(lab))


def test_a_taken_session_leaves_nothing(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was free when the launch looked; tmux itself decides who has the name."""
    monkeypatch.setattr(launch, "prepare", lambda _: ready(lab, tmux="taken"))
    refused = SimpleNamespace(returncode=1, stdout="", stderr="duplicate session: taken")
    monkeypatch.setattr(tmux, "_tmux", lambda *words: refused)
    with pytest.raises(CppmegaError, match="session-exists"):
        start.launch(asked(lab.root.parent / "runs", tmux="taken"))
    assert not (lab.root.parent / "runs").exists()


def test_tmux_that_does_not_answer_is_not_a_free_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tmux.shutil, "which", lambda name: "/usr/bin/tmux")
    for said, found in (
        ("can't find session: a", False),
        ("no current target", False),
        ("no server running on /tmp/tmux-0/default", False),
        ("error connecting to /tmp/tmux-0/default (No such file or directory)", False),
        ("server version is too old for client", None),
        ("error connecting to /tmp/tmux-0/default (Permission denied)", None),
    ):
        done = SimpleNamespace(returncode=1, stderr=said)
        monkeypatch.setattr(tmux, "_tmux", lambda *words, done=done: done)
        if found is False:
            assert not tmux.exists("a")
            continue
        with pytest.raises(CppmegaError, match="tmux-broken"):
            tmux.exists("a")


def test_no_name_of_a_secret_is_known_beforehand() -> None:
    """What is recorded of the environment is what is listed, less what looks like a secret."""
    secrets = {
        **dict.fromkeys(("SLURM_JWT", "HF_AUTH", "WANDB_api_key", "MASTER_PASSWORD"), "x"),
        **dict.fromkeys(("NVIDIA_API_KEY", "PYTHON_INDEX_LOGIN", "HF_anything", "HOME"), "x"),
        **{"CUDA_COOKIE": "x", "NCCL_X": "a" * 40, "TORCH_X": "Ab1" * 12, "UCX_Y": "AuthX"},
    }
    kept = {
        **{"CUDA_VISIBLE_DEVICES": "GPU-8e2c1b3a-1111-2222-3333-444455556666,1"},
        **{"NCCL_IB_HCA": "mlx5_0:1,mlx5_1:1", "PYTHONPATH": "/a:/b", "MASTER_ADDR": "h"},
        **{"OMP_NUM_THREADS": "1", "SLURM_JOB_ID": "7", "WANDB_PROJECT": "p", "HF_HOME": "/h"},
    }
    assert redact.environment({**secrets, **kept}) == {**kept, "UCX_Y": "AuthX"}
    url = redact.environment(
        {"WANDB_BASE_URL": "https://me:pw@host/x", "NCCL_Z": "hf_abcdefghijklm"}
    )
    assert url == {"WANDB_BASE_URL": f"https://{redact.HIDDEN}@host/x", "NCCL_Z": redact.HIDDEN}


def test_secrets_in_words_and_none_where_tokens_are_meant() -> None:
    hidden = redact.HIDDEN
    line = ["--hf-token", "a", "--api-key=b", "--wandb-api-key", "c", "--password", "d", "e"]
    safe = ["--hf-token", "?", "--api-key=?", "--wandb-api-key", "?", "--password", "?", "e"]
    assert redact.words(line) == [word.replace("?", hidden) for word in safe]
    token = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2ln"
    for word, safe in (
        ("http://me:pw@host:80/x", f"http://{hidden}@host:80/x"),
        ("s3://b/k?X-Amz-Signature=f00&y=1", f"s3://b/k?X-Amz-Signature={hidden}&y=1"),
        (f"prefix {token}", f"prefix {hidden}"),
        ("Authorization: Bearer abcdefgh", f"Authorization: {hidden}"),
    ):
        assert redact.text(word) == safe
        assert redact.everywhere({"a": [word, {"b": word}], "n": 1}) == {
            "a": [safe, {"b": safe}],
            "n": 1,
        }
    plain = [
        "--eod-token",
        "3",
        "--tokenizer-type",
        "GPT",
        "--moe-token-dispatcher-type",
        "alltoall",
    ]
    plain += ["--calculate-per-token-loss", "--token", "--lr", "1e-4", "--save", "/a@b/c"]
    plain += ["--special-tokens", "x", "https://host/a@b", "git@host:x", "--kv-channels", "64"]
    assert redact.words(plain) == plain


def test_git_state_of_files_that_git_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text("")
    assert launch_record.git_state(tmp_path / "recipe.py") is None


def test_looking_at_a_repository_runs_nothing_that_it_names(tmp_path: Path) -> None:
    recipe, mark, hook = (tmp_path / name for name in ("recipe.py", "hacked", "hook"))
    recipe.write_text("")
    hook.write_text(f"#!/bin/sh\ntouch {mark}\n")
    hook.chmod(0o755)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "recipe.py"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    subprocess.run([*git, "config", "core.fsmonitor", str(hook)], check=True)
    state = launch_record.git_state(recipe)
    assert state is not None and not state.changed and not mark.exists()


def test_a_pipe_in_a_run_folder_is_not_waited_for(tmp_path: Path) -> None:
    run = make(tmp_path, "odd", 1)
    ended(run, 0)
    run.checkpoints.mkdir()
    (node,) = run.nodes()
    node.status_file.unlink()
    for file in (node.status_file, run.metrics, run.checkpoints / TRACKER):
        os.mkfifo(file)
    row = listing.row_of(run_folder.find(tmp_path, "odd"))
    assert (row.state, row.step, row.checkpoint) == ("starting", None, None)


def test_what_the_ranks_see() -> None:
    cpu = launch.environment_of(recipes_index.load("smoke_cpu"), {"A": "b"})
    assert cpu == {"A": "b", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    gpu = recipes_index.load("nam56r_h200_slice")
    given = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "OMP_NUM_THREADS": "4"}
    seen = launch.environment_of(gpu, given)
    assert seen["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64,expandable_segments:True"
    assert seen["OMP_NUM_THREADS"] == "4" and "CUDA_VISIBLE_DEVICES" not in seen


def test_options_become_the_same_options_again(tmp_path: Path) -> None:
    line = ["--set", "lr=1", "--set", "seed=2", "--data", "a", "--data", "b", "--mock-data"]
    line += ["--save", str(tmp_path), "--exit-interval", "3", "--wandb-project", "p"]
    line += ["--profile", "2", "--profile-after", "5", "--profile-folder", "there"]
    read, rest = trainer_options.read([*line, "--lr", "1"])
    assert trainer_options.read(read.words()) == (read, ())
    assert rest == ("--lr", "1")
    assert read.words(without=("save",)) == [
        w for w in read.words() if w not in ("--save", str(tmp_path))
    ]


def test_the_shell_script_hands_over_to_the_same_launcher(tmp_path: Path) -> None:
    script = str(REPOSITORY / "scripts" / "train.sh")
    environment = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "NNODES": "2"}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [script, *words], cwd=tmp_path, env=environment, capture_output=True, text=True
        )

    assert run().returncode == 2
    done = run("smoke_cpu", "--set", "lr=1")
    assert done.returncode == 1 and "error: no-rendezvous" in done.stderr  # NNODES has arrived
    environment["RDZV"] = "host:1"
    done = run("smoke_cpu", "--name", "a b")
    assert done.returncode == 1 and "error: bad-run-name" in done.stderr
