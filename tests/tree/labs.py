"""What the tests of trees share: a lab that is a clone of upstream, and one that refuses."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from cppmega.errors import CppmegaError
from tests.support.lab import Lab
from tests.support.made import snapshot


def run_git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "gc.auto=0"]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    done = subprocess.run(
        ["git", *identity, "-C", str(folder), *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**clean, "GIT_CONFIG_GLOBAL": os.devnull},
    )
    return done.stdout


def checkout(lab: Lab) -> None:
    """A clone of upstream: git vouches for every file."""
    lab.export()
    run_git(lab.root, "init", "-q")
    run_git(lab.root, "add", ".")
    run_git(lab.root, "commit", "-qm", "upstream")


def fails(lab: Lab, name: str) -> CppmegaError:
    before = snapshot(lab.root)
    with pytest.raises(CppmegaError) as caught:
        lab.apply()
    assert caught.value.name == name
    assert snapshot(lab.root) == before
    return caught.value
