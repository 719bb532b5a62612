"""A made text, prepared as bytes by the script that users call."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support import REPOSITORY


def prepare(prefix: Path, source: Path) -> None:
    """Prepare a text as bytes."""
    command = [sys.executable, "-W", "ignore", str(REPOSITORY / "scripts" / "prepare_data.py")]
    environment = {"PYTHONPATH": str(REPOSITORY), "PATH": "", "OMP_NUM_THREADS": "1"}
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
