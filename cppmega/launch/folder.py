"""The run folder of a launch: created once, joined by further hosts."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cppmega.errors import CppmegaError
from cppmega.host import gpus, redact
from cppmega.launch import record as launch_record
from cppmega.launch.request import ValidatedLaunch
from cppmega.overlay import record as overlay_record
from cppmega.runs import folder as run_folder
from cppmega.runs import json_file
from cppmega.runs.folder import Node, Run, RunExistsError
from cppmega.runs.manifest import Manifest, MegatronRecord, RecipeRecord

_JOIN = 60.0
"""Seconds for which a further host waits for the first one's manifest."""


def create(validated: ValidatedLaunch) -> Node:
    """Create the run folder with everything in it, or join the one that another host created.

    Raises:
        RunExistsError: `run-exists`.
        CppmegaError: `write-failed`, `launch-differs`, and what `run_folder.create`
            raises.
    """
    runs = validated.folder.parent
    # Everything in a manifest is copied, compared and sent around: no credential may be in it.
    manifest = redact.everywhere(json_file.plain(_manifest(validated)))
    try:
        run = run_folder.create(runs, validated.folder.name)
    except RunExistsError as error:
        if validated.request.nodes == 1:
            raise
        return _join(validated, Run(validated.folder), manifest, error)
    try:
        return _fill(validated, run, manifest)
    except OSError as error:
        shutil.rmtree(run.path, ignore_errors=True)  # it is new, and not a run yet
        raise CppmegaError(
            "write-failed",
            f"{run.path} cannot be written: {error.strerror}.",
            "Without its manifest the run could not be identified later. Nothing was started.",
            f"df -h {runs}; or --runs FOLDER on a disk with room",
        ) from error


def _fill(validated: ValidatedLaunch, run: Run, manifest: Mapping[str, Any]) -> Node:
    (run.path / "recipe").mkdir()
    shutil.copyfile(validated.source, run.path / "recipe" / f"{validated.name}.py")
    (run.path / "receipt.json").write_bytes(validated.context.receipt.dump())
    node = run_folder.claim_node(run, validated.request.nodes)
    assert node is not None, "the folder is new"
    json_file.write(run.manifest_file, manifest)  # last: from now on it is a run
    return node


def _join(
    validated: ValidatedLaunch, run: Run, manifest: Mapping[str, Any], exists: RunExistsError
) -> Node:
    deadline = time.monotonic() + _JOIN
    while not run.manifest_file.is_file() and time.monotonic() < deadline:
        time.sleep(0.2)
    mine, theirs = json_file.convert(manifest, Manifest), run.outline
    for part in ("torchrun", "overlay", "arguments"):
        if getattr(theirs, part, None) != getattr(mine, part):
            raise CppmegaError(
                "launch-differs",
                f"{run.name} was launched with a different {part} from this host's.",
                "The hosts of one run would train different things.",
                "the same command and the same overlay on every host, and a new --name",
            )
    node = run_folder.claim_node(run, validated.request.nodes)
    if node is None:
        raise exists
    return node


def _manifest(validated: ValidatedLaunch) -> Manifest:
    request, context, options = validated.request, validated.context, validated.options
    return Manifest(
        name=validated.folder.name,
        created=time.time(),
        command=tuple(redact.words(sys.argv)),
        folder=str(Path.cwd()),
        tmux=request.tmux,
        resumes=request.resume,
        recipe=_recipe(validated),
        cppmega=launch_record.tool(),
        overlay=overlay_record.record_of(context.receipt, context.accepted, context.fallbacks),
        megatron=MegatronRecord(
            version=context.session.read_tree().version, root=str(context.session.root)
        ),
        arguments=tuple(redact.words(validated.argv)),
        options=options,
        torchrun=tuple(redact.words(validated.torchrun)),
        environment=redact.environment(validated.environment),
        stack=launch_record.versions(),
        gpus=tuple(f"{gpu.name}, {gpu.memory}" for gpu in gpus.reported()),
        data=validated.data,
        nodes=request.nodes,
        nproc=validated.nproc,
        save=_text(options.save),
        load=_text(options.load),
        metrics=_text(options.metrics),
        preflight=dict(validated.checks),
    )


def _recipe(validated: ValidatedLaunch) -> RecipeRecord:
    source = launch_record.source_file(validated.source)
    return RecipeRecord(
        name=validated.name,
        path=source.path,
        sha256=source.sha256,
        git=source.git,
        changes=validated.options.changes,
    )


def _text(path: Path | None) -> str | None:
    return str(path) if path is not None else None
