"""The trees of recorded commits of upstream's branches, which have no wheels."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import tarfile
import tempfile
import urllib.error
import urllib.request
from functools import cache
from pathlib import Path

import pytest

from cppmega.tree import wheels

ARCHIVE = "https://codeload.github.com/NVIDIA/Megatron-LM/tar.gz/{0}"
REPOSITORY = "MEGATRON_REPOSITORY"
"""The variable with a local repository that holds the commits, where upstream is out of reach."""
SECONDS = 20.0
"""After which a server that does not answer is out of reach."""


def root(label: str, commit: str) -> Path:
    """ROOT of the tree of a commit: in the cache, or fetched. Skips the test where it cannot be."""
    if reason := missing(label, commit):
        pytest.skip(reason)
    return wheels.cache() / "trees" / label


def missing(label: str, commit: str) -> str:
    """The reason why the tree of a commit cannot be had; nothing if it is in the cache now."""
    place = wheels.cache() / "trees" / label
    reason = "" if place.is_dir() else _fetched(commit, place)
    return reason and f"{label} is not in {place.parent} and {reason}"


@cache
def _fetched(commit: str, place: Path) -> str:
    """Unpack `megatron/` of a commit; the reason why that was not possible, or nothing."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as scratch:
        try:
            with tarfile.open(fileobj=io.BytesIO(_archive(commit))) as archive:
                archive.extractall(scratch, filter="data")
        except (OSError, subprocess.SubprocessError) as error:
            return f"cannot be fetched ({error}); {REPOSITORY} names no repository with {commit}"
        (package,) = Path(scratch).glob("**/megatron/core/..")
        (Path(scratch) / "tree").mkdir()
        package.resolve().rename(Path(scratch) / "tree" / "megatron")
        with contextlib.suppress(OSError):  # another process was first
            (Path(scratch) / "tree").rename(place)
    return "" if place.is_dir() else f"cannot be put at {place}"


def _archive(commit: str) -> bytes:
    if local := os.environ.get(REPOSITORY):
        command = ["git", "-C", local, "archive", "--format=tar", commit, "megatron"]
        return subprocess.run(command, capture_output=True, check=True).stdout
    with urllib.request.urlopen(ARCHIVE.format(commit), timeout=SECONDS) as answer:
        content: bytes = answer.read()
    return content
