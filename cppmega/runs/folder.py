"""Run folders: what was launched, where it writes, and how it ended. Never reused, never removed.

RUNS/NAME/
    manifest.json         what was launched: overlay, arguments, environment, stack, data
    recipe/NAME.py        the recipe as it was, whose copy the ranks load; or the script
    receipt.json          what was applied to Megatron
    metrics.jsonl         one object per logged step
    checkpoints/          unless --save names another folder
    profile/              trace and summary of the profiled steps, with --profile
    nodes/0/              one for each host of the launch
        status.json       the process in charge, its workers, the exit status
        failure.json      the rank that failed first, until the status has it
        ends/             a record from each rank that reached its end
        console.log       what torchrun and its ranks printed
        logs/             each rank's stdout and stderr, by torchrun
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from cppmega.checkpoints import tracker as checkpoint_tracker
from cppmega.errors import CppmegaError
from cppmega.host import durable, env
from cppmega.recipe.run_options import RunOptions
from cppmega.runs import json_file, liveness, metrics
from cppmega.runs import manifest as run_manifest
from cppmega.runs import status as run_status
from cppmega.runs.manifest import Manifest, Outline
from cppmega.runs.metrics import LoggedStep, Start
from cppmega.runs.status import Status

RunState = Literal["starting", "running", "stopping", "finished", "stopped", "crashed", "killed"]
LIVE: frozenset[RunState] = frozenset({"starting", "running", "stopping"})
MEANING: dict[RunState, str] = {
    "starting": "no process is in charge yet",
    "running": "the process in charge is alive",
    "stopping": "it was asked to save a checkpoint and end",
    "finished": "it ended by itself with exit status 0",
    "stopped": "it ended because it was asked to",
    "crashed": "a rank failed",
    "killed": "the process in charge was killed and left no exit status",
}

_START = 30.0
"""Seconds after which a folder without a process in charge is not a launch under way."""


class RunExistsError(CppmegaError):
    """The folder of a new run is already there."""


class RunDamagedError(CppmegaError):
    """The manifest of a run does not state what was launched."""


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
        """The run that this is a part of."""
        return Run(self.path.parent.parent)

    def status(self) -> Status | None:
        """The last state that the process in charge wrote; None if missing or damaged."""
        return run_status.read(self.status_file)

    def write(self, status: Status) -> None:
        """Replace the status; a reader sees the old one or the new one, on a full disk too."""
        durable.write(self.status_file, json_file.plain(status))

    def here(self) -> bool:
        """Whether its processes are on this machine."""
        status = self.status()
        return status is not None and liveness.here(status)

    def state(self) -> RunState:
        """The state of this part of the run."""
        status = self.status()
        state = self._state_with(status)
        if state == "killed" and self.status() != status:
            return self.state()  # it wrote how it ended, and ended, after the status was read
        return state

    def _state_with(self, status: Status | None) -> RunState:
        if status is None:
            if liveness.held(self.console):
                return "running"  # and its status is damaged, or another user's
            return "starting" if _may_be_starting(self.path) else "killed"
        if status.ended is not None:
            return _ended(status)
        live: RunState = "stopping" if status.stop else "running"
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
    def _read(self) -> tuple[Outline, str]:
        return run_manifest.read(self.manifest_file)

    @property
    def outline(self) -> Outline:
        """The readable part of the manifest."""
        return self._read[0]

    @property
    def problem(self) -> str:
        """The reason why the manifest cannot be read; empty if it can."""
        return self._read[1]

    @property
    def manifest(self) -> Manifest:
        """The complete manifest.

        Raises:
            RunDamagedError: `run-damaged`.
        """
        outline, problem = self._read
        if isinstance(outline, Manifest):
            return outline
        lacks = "its manifest lacks " + ", ".join(run_manifest.missing(self.manifest_file))
        raise RunDamagedError(
            "run-damaged",
            f"{self.path}: {problem or lacks}.",
            "It does not state what was launched.",
            f"cppmega logs {self.name} shows what it printed; its checkpoints can be given to "
            "--load",
        )

    @property
    def word(self) -> str:
        """Its name in a command: its folder if that is not among the default ones."""
        return self.name if self.path.parent == root().absolute() else str(self.path)

    @property
    def checkpoints(self) -> Path:
        """Where it saves; its own folder first, which may have been moved."""
        return _first_existing(self.path / "checkpoints", self.outline.save)

    @property
    def profile(self) -> Path:
        """Where its profile is; its own folder first, which may have been moved."""
        recorded = self._options and self._options.profile_folder
        return _first_existing(self.path / "profile", str(recorded) if recorded else None)

    @property
    def profiled_steps(self) -> int:
        """How many of its steps it was launched to profile."""
        return (self._options and self._options.profile) or 0

    @property
    def _options(self) -> RunOptions | None:
        outline = self.outline
        return outline.options if isinstance(outline, Manifest) else None

    @property
    def logged(self) -> Path:
        """The metrics that exist; its own folder first, which may have been moved."""
        return _first_existing(self.metrics, self.outline.metrics)

    def nodes(self) -> list[Node]:
        """The hosts that have joined so far."""
        folder = self.path / "nodes"
        numbered = [path for path in folder.glob("*") if path.name.isdigit()]
        return [Node(path) for path in sorted(numbered, key=lambda path: int(path.name))]

    def state(self) -> RunState:
        """The state of all its hosts: live while one of them is, then the worst."""
        states = {node.state() for node in self.nodes()}
        if not states:
            return "starting" if _may_be_starting(self.path) else "killed"
        order: tuple[RunState, ...] = (
            *("running", "stopping", "starting"),
            *("crashed", "killed", "stopped", "finished"),
        )
        return next(state for state in order if state in states)

    def exit(self) -> int | None:
        """The first exit status that is not 0; None while it runs or if none was kept."""
        statuses = [node.status() for node in self.nodes()]
        codes = [status.exit if status is not None else None for status in statuses]
        failed = next((code for code in codes if code), None)
        return 0 if codes and failed is None and None not in codes else failed

    def steps(self) -> list[LoggedStep]:
        """The logged steps."""
        return metrics.steps(self.logged)

    def starts(self) -> list[Start]:
        """The headers that its ranks wrote when they started."""
        return metrics.starts(self.logged)

    def last_step(self) -> LoggedStep | None:
        """The last logged step."""
        return next(reversed(metrics.last_steps(self.logged)), None)

    def checkpoint(self) -> int | None:
        """Step of the newest complete checkpoint."""
        return checkpoint_tracker.newest_step(self.checkpoints)


def _first_existing(own: Path, recorded: str | None) -> Path:
    return own if own.exists() else Path(recorded or own)


def _may_be_starting(folder: Path) -> bool:
    """Whether a launch may still be under way; clocks may be set back."""
    try:
        return abs(time.time() - folder.stat().st_mtime) < _START
    except OSError:
        return False


def _ended(status: Status) -> RunState:
    """How it ended; a rank that fails while it saves its last checkpoint has crashed."""
    if status.exit is None:
        return "killed"  # written by a process that outlived the one in charge
    if status.exit == 0:
        return "stopped" if status.stop else "finished"
    # Ranks that were not yet ready to save are ended by the signal itself.
    by_the_stop = bool(status.failure and status.failure.signal == "SIGTERM")
    return "stopped" if status.stop == "now" or (status.stop and by_the_stop) else "crashed"


def root(folder: Path | None = None) -> Path:
    """The folder of all run folders: the named one, the variable's, or `./runs`."""
    return folder or env.RUNS.read()


def create(runs: Path, name: str) -> Run:
    """Create the folder of a run.

    Raises:
        RunExistsError: `run-exists`.
        CppmegaError: `bad-name`, `folder-not-writable`.
    """
    check_name(name)
    folder = runs / name
    if os.path.lexists(folder):
        raise already_exists(folder)
    try:
        runs.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except OSError as error:
        if os.path.lexists(folder):  # another launch was faster
            raise already_exists(folder) from None
        raise CppmegaError(
            "folder-not-writable",
            f"{folder} cannot be created: {error.strerror}.",
            "Without it there would be no record of what ran.",
            f"--runs FOLDER, or export {env.RUNS.name}=FOLDER",
        ) from error
    return Run(folder.absolute())


def already_exists(folder: Path) -> RunExistsError:
    """The error of a folder that cannot be a new run's."""
    return RunExistsError(
        "run-exists",
        f"{folder} already exists.",
        "A run folder is never reused: it is the record of what was trained.",
        f"another --name; to resume from its checkpoint: --resume {folder.name}",
    )


def check_name(name: str) -> None:
    """Check that a name is one plain word: it becomes a folder and is typed in commands.

    Raises:
        CppmegaError: `bad-name`.
    """
    plain = name.replace("-", "").replace("_", "").replace(".", "").replace("+", "")
    if not (plain.isalnum() and plain.isascii()) or name[0] in "-.":
        raise CppmegaError(
            "bad-name",
            f"{name!r} is not a valid name for a run.",
            "It becomes a folder, and is typed in commands.",
            "use letters, digits, - and _",
        )


def fresh_name(runs: Path, stem: str) -> str:
    """Name a run by recipe and time, with a number if two are launched in one second."""
    name = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    number, free = 2, name
    while os.path.lexists(runs / free):
        free, number = f"{name}-{number}", number + 1
    return free


def claim_node(run: Run, nodes: int) -> Node | None:
    """Claim the next free host index; None if all hosts of the launch have joined."""
    for number in range(nodes):
        try:
            (run.path / "nodes" / str(number)).mkdir(parents=True)
        except FileExistsError:
            continue
        return Node(run.path / "nodes" / str(number))
    return None


def everyone(runs: Path) -> list[Run]:
    """All run folders, the newest first."""
    known = [Run(path.parent.absolute()) for path in runs.glob("*/manifest.json")]
    return sorted(known, key=lambda run: run.outline.created or 0.0, reverse=True)


def find(runs: Path, name: str | None) -> Run:
    """Find a run by its folder, name, tmux session or the start of its name; None: the newest.

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
        [run for run in known if run.outline.tmux == name][:1],  # the newest of that name
        [run for run in known if name and run.name.startswith(name)],
    ):
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise CppmegaError(
                "run-ambiguous",
                f"{name} may be {', '.join(run.name for run in matches[:5])}.",
                "The command must not reach the wrong run.",
                f"write its full name: {matches[0].word}",
            )
    raise CppmegaError(
        "run-unknown",
        f"There is no run {name!r} in {runs.absolute()}.",
        "The newest are " + ", ".join(run.name for run in known[:5]) + ".",
        "cppmega runs" + ("" if runs.absolute() == root().absolute() else f" --runs {runs}"),
    )
