"""Runs with a real torchrun whose ranks are a script without torch, so that one takes seconds.

The script steps, saves a number on SIGTERM as Megatron saves a checkpoint, and fails when told to.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cppmega.host import process
from cppmega.runs import folder as run_folder
from cppmega.runs import json_file, tmux
from cppmega.runs.folder import Run
from tests.support import PATIENCE, REPOSITORY, free_port

needs_tmux = pytest.mark.skipif(
    shutil.which("tmux") is None,
    reason="tmux is not installed; scripts/test.sh installs it where it may",
)

RANK = """
import json, os, signal, sys, time
from pathlib import Path
from cppmega.host import process
from cppmega.guard import error_file
process.end_with_parent()
run, rank = Path(os.environ["CPPMEGA_RUN"]), os.environ["RANK"]
asked = []
signal.signal(signal.SIGTERM, lambda *a: asked.append(1))
mode = sys.argv[1]
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(f"rank {rank} of {os.environ['WORLD_SIZE']}, mark {os.environ.get('MARK')}", flush=True)
(run / f"ready-{rank}").write_text(str(os.getpid()))
if mode == "fails":
    other = 1 - int(rank)
    while not (run / f"ready-{other}").exists():
        time.sleep(0.01)
    try:
        if rank == "1":
            raise ValueError("the data ended")
        while not list(run.glob("nodes/0/logs/*/attempt_0/1/error.json")):
            time.sleep(0.01)
        raise ConnectionError("the other rank is gone")
    except Exception as error:
        error_file.record(error)
        raise
if mode == "helped" and rank == "0":
    import subprocess
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    (run / "helper").write_text(str(helper.pid))
if mode == "exits":
    print("the last words", file=sys.stderr, flush=True)
    sys.exit(3 if rank == "0" else 0)
for step in range(20000 if mode in ("long", "helped", "stubborn") else 50):
    time.sleep(0.02)
    if rank == "0":
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step + 1, "loss": 1.5, "seconds": 0.02,
                                   "tokens_per_second": 50.0}) + "\\n")
    if asked:
        break
if rank == "0":
    (run / "checkpoints").mkdir(exist_ok=True)
    # More than a file of the launcher that is replaced at this moment leaves free on a full disk.
    (run / "checkpoints" / "weights").write_bytes(bytes(2**16))
    (run / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(step + 1))
print(f"rank {rank} saved step {step + 1}", flush=True)
"""

_HELD = """
import os, sys, time
from pathlib import Path
parent = os.getppid()
while "cppmega.launch.agent" in sys.orig_argv and not Path({begin!r}).exists():
    time.sleep(0.01)
    if os.getppid() != parent:
        os._exit(1)
"""


def until(holds: Callable[[], bool], run: Run) -> None:
    """Wait for something that a run will do."""
    begun = last_alive = time.monotonic()
    while not holds():
        now = time.monotonic()
        last_alive = now if run.state() in ("starting", "running", "stopping") else last_alive
        said = "".join(node.console.read_text() for node in run.nodes() if node.console.exists())
        waited = f"{run.state()} after {now - begun:.0f} s\n{said[-3000:]}"
        assert now < begun + PATIENCE and now < last_alive + ENDED, waited
        time.sleep(0.05)


ENDED = 60.0
"""Seconds after the end of a run in which something may still be written."""


class Bench:
    """Run folders as `cppmega launch` makes them, for the script above."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs = folder, folder / "runs"
        self.script = folder / "rank.py"
        self.script.write_text(RANK)
        self.started: list[subprocess.Popen[bytes]] = []
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("CPPMEGA_", "TMUX"))},
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            "MARK": "given",
        }

    def run(self, name: str, mode: str, nodes: int = 1, session: str | None = None) -> Run:
        run = run_folder.create(self.runs, name)
        where = ["--standalone"]
        if nodes > 1:
            where = ["--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-id", name]
            where += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
        words = [*where, "--nproc-per-node", str(2 // nodes), "--redirects", "3", "--tee", "0:3"]
        for _ in range(nodes):
            assert run_folder.claim_node(run, nodes) is not None
        manifest = {
            "created": time.time(),
            "tmux": session,
            "nodes": nodes,
            "nproc": 2 // nodes,
            "torchrun": [*words, str(self.script), mode],
            "overlay": {"digest": "0123456789abcdef"},
        }
        json_file.write(run.manifest_file, manifest)
        return run

    def hold_torchrun(self) -> Path:
        """A file without which torchrun does not begin, from now on.

        Its process waits where Python starts, however long the process in charge takes to write
        down that there is one.
        """
        begin, site = self.folder / "begin", self.folder / "held"
        site.mkdir()
        (site / "sitecustomize.py").write_text(_HELD.format(begin=str(begin)))
        self.environment["PYTHONPATH"] = f"{site}:{REPOSITORY}"
        return begin

    def start(self, run: Run, *before: str) -> list[subprocess.Popen[bytes]]:
        """In this terminal, so to say."""
        made = [
            subprocess.Popen(
                [*before, sys.executable, "-m", "cppmega.launch.supervise", str(node.path)],
                env=self.environment,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
            for node in run.nodes()
        ]
        self.started += made
        return made

    def start_in_tmux(self, run: Run) -> None:
        """As `cppmega launch --tmux` does."""
        command = [sys.executable, "-m", "cppmega.launch.supervise", str(run.nodes()[0].path)]
        tmux.start(run.outline.tmux, command, self.folder, self.environment)


def ready(run: Run) -> bool:
    """Both ranks have come to their loop."""
    files = [run.path / f"ready-{rank}" for rank in (0, 1)]
    return all(file.exists() and file.read_text() for file in files)


def torchrun_recorded(run: Run) -> bool:
    """The process in charge has written down which torchrun is its own."""
    status = run.nodes()[0].status()
    return status is not None and bool(status.agent)


def ranks_recorded(run: Run) -> bool:
    """The process in charge has written down both ranks, which may take a slow disk a while."""
    status = run.nodes()[0].status()
    return status is not None and len(status.workers) == 2


def ranks(run: Run) -> list[int]:
    """Processes of the ranks."""
    return [int((run.path / f"ready-{rank}").read_text()) for rank in (0, 1)]


def gone(run: Run) -> bool:
    """No rank is left that holds a GPU."""
    return not any(process.started(pid) for pid in ranks(run))
