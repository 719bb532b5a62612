"""Transcripts of commands: run while the site is built, or recorded where they need torch."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cppmega.tree import wheels

REPOSITORY = Path(__file__).resolve().parent.parent
RECORDED = REPOSITORY / "docs" / "transcripts"
VERSION = "0.19.2"
_LINES = 28
"""A longer answer is cut: the reader wants its form."""


@dataclass(frozen=True)
class Shown:
    """One command of a transcript."""

    words: str
    """As the reader types it."""
    status: int = 0
    notes: bool = True
    """What it says on stderr belongs to the transcript."""
    tree: bool = False
    """It works on a tree; `--megatron`, which names the one of the build, is not shown."""


LIVE: dict[str, tuple[Shown, ...]] = {
    "list": (Shown("cppmega list"),),
    "explain": (Shown("cppmega explain data-not-found"),),
    "refused": (
        Shown("cppmega launch smoke_cpu --set hidden_sise=64", 1),
        Shown("cppmega explain unknown-field"),
    ),
    "apply": (Shown("cppmega apply", tree=True), Shown("cppmega apply --check", tree=True)),
    "status": (Shown("cppmega status", tree=True),),
    "diff": (Shown("cppmega diff dataset_helpers_prebuilt", tree=True),),
    "revert": (Shown("cppmega revert", tree=True),),
    "drift": (Shown("cppmega drift 0.18.2 0.19.2"),),
    "recipes": (Shown("cppmega recipes"),),
    "runs": (Shown("cppmega runs"),),
    "logs": (Shown("cppmega logs crashed", 1),),
    "compare": (Shown("cppmega compare crashed finished"),),
    "stop": (Shown("cppmega stop finished", 1),),
    "new": (
        Shown(
            "cppmega new my_fix --dir patches --target "
            "megatron/core/transformer/mlp.py:MLP.forward",
            tree=True,
        ),
    ),
    "pin": (Shown("cppmega pin dsa_indexer_rope 0.18.2"),),
}
"""Commands that need no torch: they are run whenever the site is built."""

WITH_TORCH: dict[str, tuple[Shown, ...]] = {
    "verify": (Shown("cppmega verify dataset_helpers_prebuilt", tree=True),),
    "preflight": (
        Shown("cppmega preflight smoke_cpu", notes=False, tree=True),
        Shown("cppmega preflight nam56r_h200_slice --mock-data", 1, notes=False, tree=True),
    ),
    "data.command": (Shown("python -m cppmega.data.command --out data/corpus text", notes=False),),
    "check_data": (
        Shown("python -m cppmega.data.command --out data/checked text", notes=False),
        Shown("python -m cppmega.check_data data/checked", notes=False),
    ),
    "structure": (
        Shown("python -m cppmega.data.command --structure --out data/code code", notes=False),
        Shown("python -m cppmega.check_data data/code", notes=False),
    ),
    "launch": (Shown("cppmega launch smoke_cpu --name demo --dry-run", tree=True),),
}
"""Commands that import torch or numpy, and take minutes: they are recorded."""


class TranscriptError(Exception):
    """A command of the documentation does not do what the documentation says."""


@cache
def live() -> dict[str, str]:
    """The transcripts that need no torch.

    Raises:
        TranscriptError: a command ends with another status.
    """
    with workplace() as place:
        return {name: transcript(shown, place) for name, shown in LIVE.items()}


def recorded() -> dict[str, str]:
    """The transcripts that need torch, as they were recorded."""
    return {name: (RECORDED / f"{name}.txt").read_text() for name in WITH_TORCH}


def record(names: Sequence[str] = ()) -> None:
    """Run the commands that need torch, or those named, and keep what they print."""
    RECORDED.mkdir(exist_ok=True)
    with workplace() as place:
        run(Shown("cppmega apply", tree=True), place)
        for name, shown in WITH_TORCH.items():
            if names and name not in names:
                continue
            (RECORDED / f"{name}.txt").write_text(transcript(shown, place))
            print(f"recorded {name}", file=sys.stderr)


@contextmanager
def workplace(stock: bool = True) -> Iterator[Path]:
    """A folder with a stock Megatron, two runs that have ended, some text and some code."""
    with tempfile.TemporaryDirectory(prefix="cppmega-docs-") as folder:
        place = Path(folder)
        if stock:
            shutil.copytree(wheels.unpacked(VERSION, print), place / "site-packages")
        runs = REPOSITORY / "tests" / "runs" / "made_at_430962d"
        shutil.copytree(runs, place / "runs")
        (place / "text").mkdir()
        for name in ("README.md", "CONTRIBUTING.md"):
            shutil.copy(REPOSITORY / name, place / "text" / f"{Path(name).stem.lower()}.txt")
        (place / "code").mkdir()
        for name in ("scripts/train.py", "scripts/smoke.py", "scripts/Dockerfile"):
            shutil.copy(REPOSITORY / name, place / "code")
        yield place


def transcript(commands: Sequence[Shown], place: Path) -> str:
    """The commands with what they print.

    Raises:
        TranscriptError: one ends with another status.
    """
    return "\n".join(f"$ {one.words}\n{_cut(run(one, place))}" for one in commands).rstrip() + "\n"


def run(shown: Shown, place: Path) -> str:
    """Run one command, and return what it prints without the names of this machine."""
    program, *words = shlex.split(shown.words)
    command = [sys.executable, "-P", *(words if program == "python" else ["-m", program, *words])]
    if shown.tree:
        command += ["--megatron", "site-packages"]
    done = subprocess.run(
        command,
        cwd=place,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if shown.notes else subprocess.DEVNULL,
        text=True,
        check=False,
    )
    if done.returncode != shown.status:
        raise TranscriptError(f"{shown.words} ended with {done.returncode}:\n{done.stdout}")
    return _neutral(done.stdout, place)


def _environment() -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("CPPMEGA_", "PYTHON", "TORCH"))
    }
    cache_folder = {"CPPMEGA_CACHE": str(wheels.cache())}
    plain = {"NO_COLOR": "1", "COLUMNS": "120", "PYTHONWARNINGS": "ignore"}
    return {**kept, **cache_folder, **plain, "PYTHONPATH": str(REPOSITORY)}


def _neutral(text: str, place: Path) -> str:
    """The text without folders, times and other traces of the machine."""
    text = text.replace(f"{place.resolve()}/", "").replace(f"{place}/", "")
    text = text.replace(" --megatron site-packages", "")
    text = text.replace(f"{REPOSITORY}/", "").replace(f"{Path.home()}/", "~/")
    text = text.replace(f"{Path(sys.executable).parent}/", "")
    text = re.sub(r"^preflight: .*\n", "", text, flags=re.MULTILINE)  # progress of a terminal
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)


def _cut(text: str) -> str:
    lines = text.splitlines()
    if len(lines) > _LINES:
        left = len(lines) - _LINES + 4
        lines = [*lines[: _LINES - 8], f"… {left} more lines", *lines[-4:]]
    return "".join(f"{line}\n" for line in lines)
