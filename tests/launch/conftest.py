"""A folder of runs with a tmux server of its own; what a test starts there is killed afterwards."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.bench import Bench


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.delenv("TMUX", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))  # a tmux server of this test's own
    bench = Bench(tmp_path)
    yield bench
    if shutil.which("tmux"):
        subprocess.run(["tmux", "kill-server"], capture_output=True, check=False)
    for started in bench.started:
        started.kill()
        started.wait()
