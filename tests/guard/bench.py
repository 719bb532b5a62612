"""Ranks under `cppmega.run`, each with a tree of its own, and a catalogue that a test writes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

from cppmega.catalogue import loader as catalogue
from cppmega.overlay import verbs as overlay
from tests import forkserver
from tests.support import REPOSITORY, free_port, made, outputs

LOOP = """
import os, sys
from cppmega import guard
if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    import torch
    torch.distributed.init_process_group("gloo")
from megatron.core.thing import double, half
{before}
for step in guard.steps(range(3), {args}):
    {body}
print(f"trained {{guard.active() is not None}}\\n", end="")  # one write: ranks share the pipe
"""


class Bench:
    """Trees, one per rank, a catalogue, a script, and processes that run it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.pages = folder, folder / "pages"
        self.pages.mkdir()
        (self.pages / "not.toml").touch()  # a catalogue that has decided nothing
        site = folder / "site"
        site.mkdir()
        # Every Python of these tests takes the made catalogue for the built-in one.
        (site / "sitecustomize.py").write_text(
            "from pathlib import Path\nfrom cppmega.catalogue import loader as catalogue\n"
            f"catalogue.builtin_folder = lambda: Path({str(self.pages)!r})\n"
        )
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("CPPMEGA_")},
            "PYTHONPATH": f"{site}:{REPOSITORY}",
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "CPPMEGA_VERBOSE": "1",  # the log names the pages
        }

    def tree(self, name: str = "root", apply: bool = True, files: dict[str, str] | None = None):
        root = made.tree(self.folder / name, files)
        if apply:
            self.apply(root)
        return root

    def apply(self, root: Path, **environment: str) -> None:
        """Apply the catalogue to a tree, in this process."""
        with mock.patch.object(catalogue, "builtin_folder", lambda: self.pages):
            outcome = overlay.apply(overlay.Session(root), environment=environment)
        assert outcome.ok, outcome.verdicts

    def cppmega(self, command: str, root: Path, **environment: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "cppmega", command, "--megatron", str(root)],
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def script(self, body: str = "double(step)", args: str = "None", before: str = "") -> Path:
        path = self.folder / "train.py"
        path.write_text(LOOP.format(body=body, args=args, before=before))
        return path

    def together(self, ranks: int) -> dict[str, str]:
        """The environment of so many ranks, with a port that no earlier ones have used."""
        world = {"WORLD_SIZE": str(ranks), "MASTER_PORT": str(free_port())}
        return {**self.environment, **world}

    def run(
        self,
        *roots: Path,
        script: Path,
        words: tuple[str, ...] = (),
        waiting: tuple[int, ...] = (),
        **environment: str,
    ):
        """One rank per root; answers (exit status, stdout, stderr) of each."""
        python = forkserver.executable()
        together = self.together(len(roots))
        ranks = [
            subprocess.Popen(
                [python, "-m", "cppmega.run", "--megatron", str(root), *words, str(script)],
                env={**together, "RANK": str(i), **environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for i, root in enumerate(roots)
        ]
        return finish(ranks, waiting)


def finish(
    ranks: list[subprocess.Popen[str]], waiting: tuple[int, ...] = ()
) -> list[tuple[int, str, str]]:
    """Wait for every rank, and then end those that wait for one that is gone."""
    ending = [number for number in range(len(ranks)) if number not in waiting]
    try:
        said = dict(zip(ending, outputs([ranks[number] for number in ending]), strict=True))
        for number in waiting:
            ranks[number].terminate()
        said |= zip(waiting, outputs([ranks[number] for number in waiting]), strict=True)
        return [(process.returncode, *said[i]) for i, process in enumerate(ranks)]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
