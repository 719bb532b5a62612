"""Run folders: what was launched, where it writes, and how it ended. Never reused, never removed.

RUNS/NAME/
    manifest.json         what was launched: overlay, arguments, environment, stack, data
    recipe/NAME.py        the recipe as it was; the ranks load this copy
    receipt.json          what was applied to megatron
    metrics.jsonl         one object per logged step
    checkpoints/          unless --save names another folder
    nodes/0/              one for each host of the launch
        status.json       the process in charge, its workers, the exit status
        failure.json      the rank that failed first, until the status has it
        console.log       what torchrun and its ranks printed
        logs/             each rank's stdout and stderr, by torchrun
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from cppmega.checkpoints import tracker as checkpoint_tracker
from cppmega.errors import CppmegaError
from cppmega.host import durable, env
from cppmega.runs import liveness
from cppmega.runs import manifest as run_manifest

State = Literal["starting", "running", "stopping", "finished", "stopped", "crashed", "killed"]
LIVE: frozenset[State] = frozenset({"starting", "running", "stopping"})
MEANING: dict[State, str] = {
    "starting": "no process is in charge yet",
    "running": "its process in charge lives",
    "stopping": "it was asked to save a checkpoint and end",
    "finished": "it ended by itself with exit status 0",
    "stopped": "it ended because it was asked to",
    "crashed": "a rank failed",
    "killed": "its process in charge was killed and left no exit status",
}

_START = 30.0
"""Seconds after which a folder without a process in charge is no launch in the making."""
_LAST = 2**16
"""Bytes at the end of the metrics that hold the last step."""


@dataclass(frozen=True)
class Node:
    """One host's part of a run."""

    path: Path

    @property
    def status_file(self) -> Path:
        return self.path / "status.json"

    @property
    def console(self) -> Path:
        return self.path / "console.log"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def run(self) -> Run:
        """The run that it is a part of."""
        return Run(self.path.parent.parent)

    def status(self) -> dict[str, Any]:
        """What the process in charge wrote last; empty before it did."""
        return run_manifest.status(self.status_file)

    def write(self, status: Mapping[str, Any]) -> None:
        """Replace the status; a reader sees the old one or the new one, on a full disk too."""
        durable.write(self.status_file, status)

    def here(self) -> bool:
        """Whether its processes are on this machine."""
        return liveness.here(self.status())

    def state(self) -> State:
        """One word."""
        status = self.status()
        if not status and liveness.held(self.console):
            return "running"  # and its status is damaged, or another user's
        if not status:
            return "starting" if _young(self.path) else "killed"
        if status.get("ended") is not None:
            return _ended(status)
        live: State = "stopping" if status.get("stop") else "running"
        if not liveness.here(status) or liveness.in_charge(status):
            return live
        if liveness.left_behind(status):
            return "stopping"  # ranks save a checkpoint: nothing may resume from it meanwhile
        return live if liveness.in_another_container(status, self.console) else "killed"


@dataclass(frozen=True)
class Run:
    """One run folder."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def manifest_file(self) -> Path:
        return self.path / "manifest.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @cached_property
    def _read(self) -> tuple[dict[str, Any], str]:
        return run_manifest.manifest(self.manifest_file)

    @property
    def manifest(self) -> dict[str, Any]:
        """What was launched; empty where nothing can be read of it."""
        return self._read[0]

    @property
    def problem(self) -> str:
        """What is wrong with the manifest."""
        return self._read[1]

    def require_whole(self) -> None:
        """For whoever needs to know what was launched.

        Raises:
            CppmegaError: `run-damaged`.
        """
        missing = run_manifest.missing(self.manifest)
        if self.problem or missing:
            raise CppmegaError(
                "run-damaged",
                f"{self.path}: {self.problem or 'its manifest lacks ' + ', '.join(missing)}.",
                "Nobody can say from it what was launched.",
                f"cppmega logs {self.name} shows what it printed; its checkpoints can be given to "
                "--load",
            )

    @property
    def word(self) -> str:
        """What names it in a command: its folder, where it is not among the default ones."""
        return self.name if self.path.parent == root().absolute() else str(self.path)

    @property
    def checkpoints(self) -> Path:
        """Where it saves; its own folder first, which may have been moved."""
        return self._own(self.path / "checkpoints", "save")

    @property
    def _metrics(self) -> Path:
        return self._own(self.metrics, "metrics")

    def _own(self, own: Path, key: str) -> Path:
        return own if own.exists() else Path(self.manifest.get(key) or own)

    def nodes(self) -> list[Node]:
        """The hosts that have joined so far."""
        folder = self.path / "nodes"
        found = [path for path in folder.glob("*") if path.name.isdigit()]
        return [Node(path) for path in sorted(found, key=lambda path: int(path.name))]

    def state(self) -> State:
        """One word for all its hosts: live while one of them is, then the worst."""
        states = {node.state() for node in self.nodes()}
        if not states:
            return "starting" if _young(self.path) else "killed"
        order: tuple[State, ...] = (
            *("running", "stopping", "starting"),
            *("crashed", "killed", "stopped", "finished"),
        )
        return next(state for state in order if state in states)

    def exit(self) -> int | None:
        """The exit status, the first that is not 0; None while it runs or where none was kept."""
        found = [node.status().get("exit") for node in self.nodes()]
        if None in found or not found:
            return next((code for code in found if code), None)
        return next((code for code in found if code), 0)

    def rows(self) -> list[dict[str, Any]]:
        """The logged steps; a line that is being written is left out."""
        return [row for row in self.all_rows() if "step" in row]

    def last_row(self) -> dict[str, Any]:
        """The last logged step, without reading the file of weeks; empty where there is none."""
        path = self._metrics
        if not path.is_file():  # a pipe would be waited for
            return {}
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - _LAST))
                lines = file.read().decode(errors="replace").split("\n")[:-1]
        except OSError:
            return {}
        for line in reversed(lines):
            if line.startswith('{"step"'):
                with contextlib.suppress(ValueError):
                    return dict(json.loads(line))
        return {}

    def all_rows(self) -> Iterator[dict[str, Any]]:
        """Everything in the metrics file, headers included."""
        path = self._metrics
        if not path.is_file():
            return
        for line in path.read_text(errors="replace").split("\n")[:-1]:
            with contextlib.suppress(ValueError):  # cut off where the disk was full
                row = json.loads(line)
                if isinstance(row, dict):
                    yield row

    def checkpoint(self) -> int | None:
        """Step of the newest whole checkpoint."""
        return checkpoint_tracker.newest_step(self.checkpoints)


def _young(folder: Path) -> bool:
    """A launch in the making; clocks are set back, too."""
    try:
        return abs(time.time() - folder.stat().st_mtime) < _START
    except OSError:
        return False


def _ended(status: Mapping[str, Any]) -> State:
    """How it ended; a rank that fails while it saves its last checkpoint has crashed."""
    if status.get("exit") is None:
        return "killed"  # written by whoever outlived the process in charge
    if status.get("exit") == 0:
        return "stopped" if status.get("stop") else "finished"
    # Ranks that were not yet ready to save end on the signal itself.
    by_us = status.get("failure", {}).get("signal") == "SIGTERM"
    asked = status.get("stop")
    return "stopped" if asked == "now" or (asked and by_us) else "crashed"


def root(given: Path | None = None) -> Path:
    """The folder of all run folders: what is named, the variable, `./runs`."""
    return given or env.RUNS.read()


def create(runs: Path, name: str) -> Run:
    """A new folder.

    Raises:
        CppmegaError: `run-exists`, `bad-run-name`, `runs-not-writable`.
    """
    check_name(name)
    folder = runs / name
    if os.path.lexists(folder):
        raise exists(folder)
    try:
        runs.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except OSError as error:
        if os.path.lexists(folder):  # another launch was faster
            raise exists(folder) from None
        raise CppmegaError(
            "runs-not-writable",
            f"{folder} cannot be made: {error.strerror}.",
            "Without it nobody could say later what ran.",
            f"--runs FOLDER, or export {env.RUNS.name}=FOLDER",
        ) from error
    return Run(folder.absolute())


def exists(folder: Path) -> CppmegaError:
    """The error of a folder that is taken."""
    return CppmegaError(
        "run-exists",
        f"{folder} is there already.",
        "A run folder is never reused: it is the record of what was trained.",
        f"another --name; to go on from its checkpoint: --resume {folder.name}",
    )


def check_name(name: str) -> None:
    """A name must be one plain word: it becomes a folder and is typed in commands.

    Raises:
        CppmegaError: `bad-run-name`.
    """
    plain = name.replace("-", "").replace("_", "").replace(".", "").replace("+", "")
    if not (plain.isalnum() and plain.isascii()) or name[0] in "-.":
        raise CppmegaError(
            "bad-run-name",
            f"{name!r} is no name for a run.",
            "It becomes a folder, and is typed in commands.",
            "use letters, digits, - and _",
        )


def fresh_name(runs: Path, stem: str) -> str:
    """Recipe and time, and a number where two are launched in one second."""
    name = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    number, found = 2, name
    while os.path.lexists(runs / found):
        found, number = f"{name}-{number}", number + 1
    return found


def claim_node(run: Run, nodes: int) -> Node | None:
    """The next free place of a host; None where as many have joined as the launch has."""
    for number in range(nodes):
        try:
            (run.path / "nodes" / str(number)).mkdir(parents=True)
        except FileExistsError:
            continue
        return Node(run.path / "nodes" / str(number))
    return None


def everyone(runs: Path) -> list[Run]:
    """All run folders, the newest first."""
    found = [Run(path.parent.absolute()) for path in runs.glob("*/manifest.json")]
    return sorted(found, key=lambda run: run.manifest.get("created", 0), reverse=True)


def find(runs: Path, name: str | None) -> Run:
    """A run by its folder, its name, its tmux session, or the start of its name; None: the newest.

    Raises:
        CppmegaError: `no-runs`, `run-unknown`, `run-ambiguous`.
    """
    known = everyone(runs)
    if name and (Path(name) / "manifest.json").is_file():
        return Run(Path(name).absolute())
    if not known:
        raise CppmegaError(
            "no-runs",
            f"There is no run folder in {runs.absolute()}.",
            "Nothing was launched there.",
            f"cppmega launch RECIPE, or --runs FOLDER, or export {env.RUNS.name}=FOLDER",
        )
    if name is None:
        return known[0]
    for matches in (
        [run for run in known if run.name == name],
        [run for run in known if run.manifest.get("tmux") == name][:1],  # the newest of that name
        [run for run in known if name and run.name.startswith(name)],
    ):
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise CppmegaError(
                "run-ambiguous",
                f"{name} may be {', '.join(run.name for run in matches[:5])}.",
                "The command must not reach the wrong run.",
                f"name it in full: {matches[0].word}",
            )
    raise CppmegaError(
        "run-unknown",
        f"There is no run {name!r} in {runs.absolute()}.",
        "The newest are " + ", ".join(run.name for run in known[:5]) + ".",
        "cppmega runs" + ("" if runs.absolute() == root().absolute() else f" --runs {runs}"),
    )


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a file as a whole."""
    durable.replace(path, (json.dumps(content, indent=1) + "\n").encode())
