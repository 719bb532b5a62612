"""Python's caches of bytecode never outlive the text that they were made of."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.lab import FILES, A, Lab

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("prefix", [False, True])
def test_same_second_same_size(lab: Lab, tmp_path: Path, prefix: bool) -> None:
    """Python trusts bytecode whose source has the same second and size; ours has both here."""
    lab.export()
    how = {"edit": "body_of(patched)", "code": "def patched(x):\n    return 7\n"}
    lab.page(**how)
    lab.apply()
    longer = len((lab.root / A).read_bytes()) - len(FILES[A])
    shutil.rmtree(lab.root)
    # The patch drops this comment with the body, so both texts now have one length.
    lab.files[A] = FILES[A].replace(b"# the sum", b"# the sum" + b"-" * longer)
    size = len(lab.files[A])
    lab.wheel()
    lab.page(**how)
    caches = {"PYTHONPYCACHEPREFIX": str(tmp_path / "cache")} if prefix else {}
    environment = lab.environment(PYTHONDONTWRITEBYTECODE="", **caches)
    second = (lab.root / A).stat().st_mtime

    def value() -> str:
        os.utime(lab.root / A, (second, second))
        done = subprocess.run(
            [sys.executable, "-c", "from megatron.core import a; print(a.double(4))"],
            env={**environment, "PYTHONPATH": str(lab.root)},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    assert value() == "8"
    everything = [*lab.root.rglob("a.*.pyc"), *tmp_path.glob("cache/**/a.*.pyc")]
    assert len(everything) == 1
    assert lab.run("apply", env=environment).returncode == 0
    assert (lab.root / A).stat().st_size == size
    assert value() == "7"
    assert lab.run("revert", env=environment).returncode == 0
    assert value() == "8"
