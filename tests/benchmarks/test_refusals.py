"""Ranks of which one is wrong: what counts as refused or resumed, and what is said of it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

refusals = importlib.import_module("benchmarks.whole.refusals")

RUN = """
import json, os, socket, sys, time
from pathlib import Path
name, metrics, folder, error = sys.argv[1:]
def trained(*steps):
    with open(metrics, "a") as file:
        file.writelines(json.dumps({"step": step}) + "\\n" for step in steps)
tracker = Path(folder, "latest_checkpointed_iteration.txt")
if error:
    print(f"error: {error}\\n  what: host {socket.gethostname()}, rank 1:", end=" ")
    print("megatron/training/training.py was edited")
    sys.exit(1)
if name != "killed":
    trained(1, 2, 3)
elif tracker.is_file():
    trained(int(tracker.read_text()) + 1)
else:
    Path(folder, "iter_0000006").mkdir(parents=True)
    trained(1, 2, 3, 4, 5, 6)
    tracker.write_text(os.environ["SAVED"])
    time.sleep(60)
"""
ERRORS = {"tampered": "overlay-not-whole", "other": "overlay-differs"}


def ran(
    folder: Path, monkeypatch: pytest.MonkeyPatch, errors: dict[str, str], saved: str = "3"
) -> Any:
    """A call with a stand-in for the runs, which ends with an error where `errors` has one."""

    class Ranks(refusals.Ranks):  # type: ignore[misc, name-defined]
        def tree(self, name: str, *options: str) -> Path:
            file = self.work / name / refusals.FILE
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
            return self.work / name

        def start(self, name: str, tree: Path, *options: str) -> subprocess.Popen[bytes]:
            words = [name, self.metrics(name), self.work / "checkpoints", errors.get(name, "")]
            variables = {**os.environ, "RANK": "1", "SAVED": saved}
            with self.log(name).open("ab") as log:
                return subprocess.Popen(
                    [sys.executable, "-c", RUN, *map(str, words)],
                    env=variables,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )

        def until(self, process: subprocess.Popen[bytes], holds: Any, what: str) -> bool:
            held: bool = super().until(process, holds, what)
            tracker = self.work / "checkpoints" / refusals.TRACKER
            while "save" in what and (not tracker.is_file() or not tracker.read_text()):
                time.sleep(0.01)
            return held

    header = {"date": "2026-01-01", "gpus": 2, "stack": {"gpu": "NVIDIA H200"}}
    monkeypatch.setattr(refusals, "Ranks", Ranks)
    monkeypatch.setattr(refusals.runs, "header", lambda bench: dict(header))
    monkeypatch.setattr(refusals, "_rank", lambda process, number: process)
    places = ("--site", "s", "--data", "d", "--work", str(folder / "w"), "--out", str(folder))
    return CliRunner().invoke(refusals.main, [*places, "--gpus", "2", "--timeout", "60"])


def test_every_case_has_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = ran(tmp_path, monkeypatch, ERRORS)
    assert done.exit_code == 0, done.output
    cases = json.loads((tmp_path / "refusals_h200_2.json").read_text())["cases"]
    assert list(cases) == ["whole", "tampered", "other", "killed"]
    page = (tmp_path / "refusals_h200_2.md").read_text()
    assert page in done.output and "| 1 | overlay-differs | host and rank, file |" in page
    assert "resumed from the complete one of step 3" in page
    assert "torchrun names none" in page


def test_torchrun_names_the_rank_that_was_killed(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(
        "import os, signal, time\n"
        "if os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    done = subprocess.run([*command, "2", str(script)], capture_output=True, text=True)
    assert done.returncode == 1
    assert refusals.first_failure(done.stderr) == {"rank": 1, "exit_code": -9}


@pytest.mark.parametrize(
    ("errors", "saved", "said"),
    [
        ({"other": ERRORS["other"]}, "3", "tampered trained"),
        ({**ERRORS, "other": "no-gpu"}, "3", "other was not refused"),
        (ERRORS, "6", "the kill came after the save"),
    ],
)
def test_what_is_not_refused_or_resumed_fails(
    errors: dict[str, str],
    saved: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = ran(tmp_path, monkeypatch, errors, saved)
    assert done.exit_code == 1 and said in done.output


def test_the_last_rank_has_its_own_tree(tmp_path: Path) -> None:
    """By the program that torchrun starts, which hands all other words on."""
    spy = tmp_path / "cppmega"
    spy.mkdir()
    (spy / "__init__.py").touch()
    (spy / "run.py").write_text("import sys; print(sys.argv[1:])")
    start = tmp_path / "start.py"
    start.write_text(refusals.START)
    found = []
    for rank in ("0", "3"):
        done = subprocess.run(
            [sys.executable, str(start), "all", "last", "4", "train.py", "--set", "x=1"],
            env={**os.environ, "RANK": rank, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
        found.append(done.stdout.strip())
    rest = ", 'train.py', '--set', 'x=1']"
    assert found == [f"['--megatron', 'all'{rest}", f"['--megatron', 'last'{rest}"]
