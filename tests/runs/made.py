"""Run folders and launches for the tests of runs, made without a process."""

from __future__ import annotations

import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from cppmega.launch.request import LaunchRequest
from cppmega.overlay import record as overlay_record
from cppmega.overlay.receipt import PatchedPage, Receipt
from cppmega.overlay.record import OverlayRecord
from cppmega.recipe.run_options import RunOptions
from cppmega.runs import folder as run_folder
from cppmega.runs import json_file
from cppmega.runs.folder import Run
from cppmega.runs.status import Status

Page = tuple[str, str]


def record(digest: str, gates: dict[str, str] | None = None, **pages: Page) -> OverlayRecord:
    """As `overlay_record.record_of` makes it; a page is (revision, text)."""
    receipt = Receipt(digest=digest, megatron="0.19.2", gates=gates or {})
    for name, (revision, text) in pages.items():
        targets = {"megatron/core/a.py:f": {"before": "x", "after": text}}
        receipt.pages[name] = PatchedPage(revision, "applied", "source", targets)
    return overlay_record.record_of(receipt)


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


def asked(runs: Path, **how: Any) -> LaunchRequest:
    """A launch as the command line makes it."""
    names = {field.name for field in fields(RunOptions)}
    options = RunOptions(**{name: how.pop(name) for name in list(how) if name in names})
    return LaunchRequest(recipe=how.pop("recipe", "smoke_cpu"), options=options, runs=runs, **how)
