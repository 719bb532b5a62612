"""Trees that configurations are run on, each in a process that has imported it."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.configurations import law
from tests.configurations.settings import Configuration
from tests.support import command_of, environment

Record = dict[str, Any]

TRAINED = ("step 1", "evaluation", "step 2", "continued", "resumed")
CROSSED = ("resumed",)


class Tree:
    """A process that runs configurations on one tree."""

    def __init__(self, root: Path, trace: bool = False) -> None:
        code = "import sys; from tests.configurations import ranks; ranks.serve(sys.argv[1])"
        code = code.replace("sys.argv[1]", repr(str(root)))
        traced = {"CONFIGURATIONS_TRACE": "1"} if trace else {}
        self.process = subprocess.Popen(
            command_of(root, code),
            env=environment(root) | {"GLOO_SOCKET_IFNAME": "lo"} | traced,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if trace else subprocess.DEVNULL,
            text=True,
        )

    def begin(self, setting: Configuration, phase: str, folder: Path) -> None:
        """Send an order; `answer` waits for what comes of it."""
        stages = TRAINED if phase == "train" else CROSSED
        order = {
            "configuration": asdict(setting),
            "phase": phase,
            "folder": str(folder),
            "stages": stages,
        }
        assert self.process.stdin is not None
        print(json.dumps(order), file=self.process.stdin, flush=True)

    def answer(self) -> Record:
        """The record of the order that was sent last."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of a tree ended with status {self.process.wait()}")
        record: Record = json.loads(line)
        return record

    def close(self) -> None:
        """Let the process end."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


@contextmanager
def opened(*roots: Path) -> Iterator[list[Tree]]:
    """The processes of some trees, which import them at the same time."""
    trees = [Tree(root) for root in roots]
    try:
        yield trees
    finally:
        for tree in trees:
            tree.close()


def records_of(setting: Configuration, stock: Tree, patched: Tree) -> dict[str, Record]:
    """Train on both trees at once, then let each load what the other has saved."""
    base = law.on_stock(setting)
    with tempfile.TemporaryDirectory() as scratch:
        folders = Path(scratch) / "stock", Path(scratch) / "patched"
        for folder in folders:
            folder.mkdir()
        records = _both(stock, patched, base, setting, "train", folders)
        found = {"stock": records[0], "patched": records[1]}
        if all("continued" in record["rows"] for record in records):
            crossed = _both(stock, patched, base, setting, "resume", folders[::-1])
            found |= {"stock loads patched": crossed[0], "patched loads stock": crossed[1]}
    return found


def _both(
    stock: Tree,
    patched: Tree,
    base: Configuration,
    setting: Configuration,
    phase: str,
    folders: tuple[Path, ...],
) -> list[Record]:
    stock.begin(base, phase, folders[0])
    patched.begin(setting, phase, folders[1])
    return [stock.answer(), patched.answer()]
