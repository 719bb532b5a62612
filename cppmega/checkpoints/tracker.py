"""The file that names the newest finished checkpoint of a folder, as Megatron writes it."""

from __future__ import annotations

from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron writes this file once a checkpoint is complete."""


def exists(folder: Path) -> bool:
    """Whether a folder holds a finished checkpoint."""
    return (folder / TRACKER).is_file()


def newest_step(folder: Path) -> int | None:
    """Return the step of the newest finished checkpoint; None if no step can be read."""
    tracker = folder / TRACKER
    try:
        return int(tracker.read_text()) if tracker.is_file() else None
    except (OSError, ValueError):
        return None
