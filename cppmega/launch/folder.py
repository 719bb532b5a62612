"""What a launch is, and the run folder that keeps it: made once, joined by further hosts."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cppmega.errors import CppmegaError
from cppmega.host import gpus, redact
from cppmega.launch import record as launch_record
from cppmega.overlay import receipt
from cppmega.overlay import record as overlay_record
from cppmega.overlay.verbs import Session
from cppmega.recipe import Recipe
from cppmega.recipe import index as recipes_index
from cppmega.recipe.run_options import RunOptions
from cppmega.runs import folder as run_folder
from cppmega.runs import manifest as run_manifest
from cppmega.runs.folder import Node, Run
from cppmega.tree import accepted

_JOIN = 60.0
"""Seconds that a further host waits for the first one's manifest."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What the command line asks for."""

    recipe: str
    options: RunOptions
    """The trainer's."""
    arguments: tuple[str, ...] = ()
    """Megatron's own, after `--`."""
    runs: Path | None = None
    name: str | None = None
    tmux: str | None = None
    nodes: int = 1
    rdzv: str | None = None
    nproc: int | None = None
    resume: str | None = None


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A launch that nothing speaks against; nothing is written yet."""

    asked: Launch
    recipe: Recipe
    folder: Path
    session: Session
    options: RunOptions
    environment: dict[str, str]
    nproc: int
    torchrun: tuple[str, ...]
    rendered: tuple[str, ...]
    """Megatron's own arguments; those of the loop where Megatron parses nothing."""
    data: dict[str, Any]
    checks: dict[str, str] = field(default_factory=dict)


def make(ready: Ready) -> Node:
    """Make the run folder with everything in it, or join the one that another host has made."""
    asked, runs = ready.asked, ready.folder.parent
    manifest = _manifest(ready)
    try:
        run = run_folder.create(runs, ready.folder.name)
    except CppmegaError as error:
        if error.name != "run-exists" or asked.nodes == 1:
            raise
        return _join(ready, Run(ready.folder), manifest, error)
    try:
        return _fill(ready, run, manifest)
    except OSError as error:
        shutil.rmtree(run.path, ignore_errors=True)  # it is new, and not a run yet
        raise CppmegaError(
            "run-folder-not-written",
            f"{run.path} cannot be written: {error.strerror}.",
            "Without its manifest the run could not be identified later. Nothing was started.",
            f"df -h {runs}; or --runs FOLDER on a disk with room",
        ) from error


def _fill(ready: Ready, run: Run, manifest: Mapping[str, Any]) -> Node:
    (run.path / "recipe").mkdir()
    source = recipes_index.file_of(ready.asked.recipe)
    shutil.copyfile(source, run.path / "recipe" / f"{ready.recipe.name}.py")
    applied = receipt.load(ready.session.tree).receipt
    (run.path / "receipt.json").write_bytes(applied.dump())
    node = run_folder.claim_node(run, ready.asked.nodes)
    assert node is not None, "the folder is new"
    run_folder.write_json(run.manifest_file, manifest)  # last: from now on it is a run
    return node


def _join(ready: Ready, run: Run, mine: Mapping[str, Any], exists: CppmegaError) -> Node:
    deadline = time.monotonic() + _JOIN
    while not run.manifest_file.is_file() and time.monotonic() < deadline:
        time.sleep(0.2)
    theirs = run_manifest.read_json(run.manifest_file)
    for part in ("torchrun", "overlay", "arguments"):
        if theirs.get(part) != mine[part]:
            raise CppmegaError(
                "launch-differs",
                f"{run.name} was launched with another {part} than this host's.",
                "The hosts of one run would train different things.",
                "the same command and the same overlay on every host, and a --name that is new",
            )
    node = run_folder.claim_node(run, ready.asked.nodes)
    if node is None:
        raise exists
    return node


def _manifest(ready: Ready) -> dict[str, Any]:
    asked = ready.asked
    source = launch_record.file_state(recipes_index.file_of(asked.recipe))
    options = {name: _plain(value) for name, value in asdict(ready.options).items()}
    edits = accepted.asked(ready.recipe.accepted_edits, ready.options.accept)
    manifest = {
        "schema": run_manifest.SCHEMA,
        "name": ready.folder.name,
        "created": time.time(),
        "command": redact.words(sys.argv),
        "folder": str(Path.cwd()),
        "tmux": asked.tmux,
        "resumes": asked.resume,
        "recipe": {"name": ready.recipe.name, **source, "changes": options["changes"]},
        "cppmega": launch_record.tool_state(),
        "overlay": overlay_record.of(receipt.load(ready.session.tree).receipt, edits),
        "megatron": {"version": ready.session.tree.version, "root": str(ready.session.root)},
        "arguments": redact.words(ready.rendered),
        "options": options,
        "torchrun": redact.words(ready.torchrun),
        "environment": redact.environment(ready.environment),
        "stack": launch_record.versions(),
        "gpus": [f"{gpu.name}, {gpu.memory}" for gpu in gpus.reported()],
        "data": ready.data,
        "nodes": asked.nodes,
        "nproc": ready.nproc,
        "save": options["save"],
        "load": options["load"],
        "metrics": options["metrics"],
        "preflight": ready.checks,
    }
    return {name: redact.everywhere(value) for name, value in manifest.items()}


def _plain(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, Path) else value
