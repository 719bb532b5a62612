"""A made text, prepared as bytes by the command that users call."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests import forkserver
from tests.support import REPOSITORY


def prepare(prefix: Path, source: Path) -> None:
    """Prepare a text as bytes."""
    command = [forkserver.executable(), "-m", "cppmega.data.command"]
    environment = {"PYTHONPATH": str(REPOSITORY), "PATH": "", "PYTHONWARNINGS": "ignore"}
    subprocess.run(
        [*command, "--out", str(prefix), str(source)],
        check=True,
        env=environment,
        capture_output=True,
    )


def paragraphs(folder: Path) -> None:
    """Prepare a made text as `own` in the folder."""
    source = folder / "text.txt"
    source.write_text("\n\n".join(f"Paragraph {n} of {n * n} in all." for n in range(800)))
    prepare(folder / "own", source)
