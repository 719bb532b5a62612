"""The whole chain on CPU: preflight, run folder, tmux, torchrun with two ranks, kill, resume."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cppmega.runs.folder import Run
from tests import forkserver
from tests.launch.bench import needs_tmux, until
from tests.support import PATIENCE, REPOSITORY, environment, patched

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

PAGES = ("mtp_roll_packed_sequences", "dataset_helpers_prebuilt")
"""What the recipe needs, and no more: the preflight proves each of them."""
STEPS, SAVES = 200, 6
COMMAND = """
from cppmega.proof import verify
verify.PYTHON = {python!r}
from cppmega.cli.main import main
main()
"""
"""The command, which proves in a fork of the session's server."""


class Console:
    """The command, in a folder and with a tmux server of its own."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.folder, self.root = folder, root
        self.environment = environment(root) | {"TMUX_TMPDIR": str(folder)}
        self.environment.pop("TMUX", None)
        command = COMMAND.format(python=forkserver.executable())
        self.command = [sys.executable, "-c", command]

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.command, *words],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )

    def launch(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self(*self.line(*words))

    def line(self, *words: str) -> list[str]:
        """Small enough for a test, long enough to be killed in."""
        fields = (f"train_iters={STEPS}", "num_layers=1", "mtp_num_layers=1")
        changes = [word for field in fields for word in ("--set", field)]
        line = ["launch", "smoke_cpu", "--megatron", str(self.root), "--save-interval", str(SAVES)]
        return [*line, *changes, *words]

    def launch_and_interrupt(self, name: str, *words: str) -> tuple[int, str]:
        """In this terminal, with Ctrl-C after some steps; exit status and output."""
        started = subprocess.Popen(
            [*self.command, *self.line("--name", name, *words)],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            run, deadline = self.run(name), time.monotonic() + PATIENCE
            while started.poll() is None and len(run.steps()) < 4 and time.monotonic() < deadline:
                time.sleep(0.05)
            started.send_signal(signal.SIGINT)
            out, _ = started.communicate(timeout=PATIENCE)
        finally:
            started.kill()
            started.wait()
        return started.returncode, out

    def run(self, name: str) -> Run:
        return Run(self.folder / "runs" / name)

    def runs(self) -> dict[str, dict[str, Any]]:
        done = self("runs", "--json")
        assert done.returncode == 0, done.stderr
        return {row["name"]: row for row in json.loads(done.stdout)["runs"]}


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Console:
    return Console(tmp_path_factory.mktemp("launch"), patched("0.19.2", *PAGES))


@needs_tmux
def test_the_chain(console: Console) -> None:
    """Launched in a session, killed, resumed from its checkpoint, compared with itself."""
    began = console.launch("--tmux", "demo", "--name", "first")
    assert began.returncode == 0, began.stderr[-3000:]
    assert began.stdout.strip() == str(console.folder / "runs" / "first")
    first = console.run("first")
    until(lambda: bool(first.checkpoint()), first)
    assert first.state() == "running"
    ranks = [int(pid) for pid in first.nodes()[0].status().workers]
    assert len(ranks) == 2
    saved = stopped_after_a_checkpoint(first, ranks)
    os.kill(ranks[1], signal.SIGKILL)
    until(lambda: not Path(f"/proc/{ranks[1]}").exists(), first)  # torchrun has seen its end
    os.kill(ranks[0], signal.SIGCONT)
    until(lambda: first.state() == "crashed", first)

    row = console.runs()["first"]
    assert (row["state"], row["exit"], row["checkpoint"]) == ("crashed", 1, saved)
    assert row["error"] == "rank 1: killed by signal 9 (SIGKILL)"
    shown = console("logs", "demo").stdout  # found by its session
    assert shown.startswith(
        f"rank 1 on {row['hosts'][0]} failed first (killed by signal 9 (SIGKILL))"
    )
    assert f"step {saved}/{STEPS}" in shown and f"checkpoint of step {saved}" in shown

    code, said = console.launch_and_interrupt("second", "--resume", "first")
    assert code == 0, said[-3000:]
    assert f"resuming at step {saved + 1}" in said and "after receiving SIGTERM" in said
    second = console.run("second")
    last = second.steps()[-1].step
    assert (second.state(), second.exit(), second.checkpoint()) == ("stopped", 0, last)
    assert second.steps()[0].step == saved + 1 and last < STEPS

    done = console("compare", "first", "second")
    assert done.returncode == 0, done.stderr
    for same in ("overlay", "recipe", "arguments", "environment", "stack", "data"):
        assert f"\n{same}: the same\n" in done.stdout, done.stdout
    assert "the losses are bitwise equal" in done.stdout
    found = json.loads(console("compare", "first", "second", "--json").stdout)
    assert found["common_steps"] >= 2 and found["largest_loss_difference"] == 0

    refused = console.launch("--name", "first")
    assert refused.returncode == 1 and "run-exists" in refused.stderr
    _manifest_says_what_ran(console)


def stopped_after_a_checkpoint(run: Run, ranks: list[int]) -> int:
    """Stop the ranks two steps after a checkpoint, and before they can come to the next one."""

    def stopped() -> bool:
        for rank in ranks:
            os.kill(rank, signal.SIGSTOP)
        since = len(run.steps()) - (run.checkpoint() or 0)
        if 2 <= since <= SAVES - 2:
            return True
        for rank in ranks:
            os.kill(rank, signal.SIGCONT)
        return False

    until(stopped, run)
    saved = run.checkpoint()
    assert saved is not None
    return saved


def _manifest_says_what_ran(console: Console) -> None:
    run = console.run("second")
    manifest, applied = run.manifest, json.loads((run.path / "receipt.json").read_text())
    assert set(manifest.overlay.pages) == set(PAGES) == set(applied["pages"])
    assert manifest.overlay.digest == applied["digest"] != "none"
    assert manifest.stack["torch"] and manifest.stack["python"]
    assert manifest.environment["CUDA_VISIBLE_DEVICES"] == ""
    assert manifest.resumes == "first"
    assert manifest.load == str(console.run("first").path / "checkpoints")
    assert manifest.data.paths == (str(console.run("first").path / "data"),)
    assert manifest.data.fingerprint
    assert set(manifest.preflight.values()) <= {"ok", "not-applicable"}
    recipe = run.path / "recipe" / "smoke_cpu.py"
    assert recipe.read_bytes() == (REPOSITORY / "recipes" / "smoke_cpu.py").read_bytes()
    (header,) = run.starts()
    assert (header.overlay, header.data) == (applied["digest"], manifest.data.fingerprint)


def test_a_launch_that_the_preflight_refuses_leaves_nothing(console: Console) -> None:
    console.environment["CPPMEGA_LINEAR_CE_KERNAL"] = "x"
    try:
        done = console.launch("--name", "refused")
    finally:
        del console.environment["CPPMEGA_LINEAR_CE_KERNAL"]
    assert done.returncode == 1 and "unknown-variable" in done.stderr
    assert "Did you mean CPPMEGA_LINEAR_CE_KERNEL?" in done.stderr
    assert not (console.folder / "runs" / "refused").exists()
