"""Saves within Megatron's loop, on forked ranks.

Imported in the process that runs a tree, never by pytest itself.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.training import async_utils

from cppmega.checkpoints import files, tracker
from cppmega.errors import CppmegaError
from cppmega.host import process
from cppmega.recipe import Recipe
from cppmega.recipe.run_options import RunOptions
from tests.configurations.settings import Configuration
from tests.recipe.test_arithmetic import BASE
from tests.training import loops
from tests.upstream_patches.forked_ranks import on_ranks
from tests.upstream_patches.optimizer.distributed_optimizer import on_cpu

RECIPE = BASE.with_(pattern="-", keep_checkpoints=1, train_iters=6)
ASYNCHRONOUS = RECIPE.with_(async_save=True)
GIVEN = RunOptions(mock_data=True, save_interval=2)
ONE = Configuration()
_WRITES = ("open", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def trained(recipe: Recipe, options: RunOptions) -> list[str]:
    """Train on this rank; returns what the trainer said of its checkpoints."""
    said = io.StringIO()
    with on_cpu(), contextlib.redirect_stdout(said):
        loops.Loop(recipe, options).train()
    return [line for line in said.getvalue().splitlines() if line.startswith("cppmega: checkpoint")]


class Disk:
    """What a kill would leave, at every moment at which something changes on disk."""

    def __init__(self, watched: Path, into: Path) -> None:
        self.watched, self.into, self.count = watched, into, 0
        self._copying = False
        sys.addaudithook(self._saw)

    def _saw(self, event: str, args: tuple[Any, ...]) -> None:
        if self._copying or event not in _WRITES or str(self.watched) not in str(args[0]):
            return
        if event == "open" and not (isinstance(args[1], str) and set("wax+") & set(args[1])):
            return
        self._copying, self.count = True, self.count + 1
        shutil.copytree(self.watched, self.into / str(self.count))
        self._copying = False


def check_a_kill_at_any_moment_leaves_a_checkpoint_that_loads(folder: Path) -> None:
    """From the first one on, while the second replaces it and the third the second."""

    def watched(setting: Configuration, save: Path, states: Path) -> tuple[list[str], int]:
        disk = Disk(save, states)
        said = trained(RECIPE, replace(GIVEN, save=save))
        return said, disk.count

    save, states = folder / "save", folder / "states"
    save.mkdir()
    ((said, count),) = on_ranks(folder, ONE, watched, save, states)
    assert [path.name for path in sorted(save.glob("iter_*"))] == ["iter_0000006"], said
    found = []
    for number in range(1, count + 1):
        if tracker.exists(states / str(number)):
            found.append(int(files.read(states / str(number)).step))
    assert found == sorted(found) and set(found) == {2, 4, 6} and len(found) > 12, found
    removed = [line for line in said if line.endswith("removed: a newer one is complete")]
    assert len(removed) == 2 and len(said) == 5
    both = [n for n in range(1, count + 1) if len(list((states / str(n)).glob("iter_*"))) == 2]
    resumed = replace(GIVEN, save=save, load=states / str(both[-1]))
    on_ranks(folder, ONE, lambda setting: trained(RECIPE.with_(train_iters=8), resumed))
    assert [path.name for path in sorted(save.glob("iter_*"))] == ["iter_0000008"]


def check_an_asynchronous_save_is_complete_when_the_tracker_names_it(folder: Path) -> None:
    """The step goes on meanwhile; the old one is removed when the new one is complete."""
    save = folder / "asynchronous"
    save.mkdir()

    def scheduled(setting: Configuration) -> list[str]:
        with writing_process():
            return trained(ASYNCHRONOUS, replace(GIVEN, save=save))

    (said,) = on_ranks(folder, ONE, scheduled)
    assert [path.name for path in save.glob("iter_*")] == ["iter_0000006"], said
    assert files.read(save).step == "6"
    copied = [line for line in said if "for which the training waited" in line]
    written = [line for line in said if "GiB/s" in line]
    assert len(copied) == len(written) == 3, said


def check_a_process_that_dies_before_it_has_written_stops_the_run(folder: Path) -> None:
    """Where Megatron would wait for it without end, at the latest when it has taken all steps."""
    save = folder / "dies"
    save.mkdir()

    def dying(setting: Configuration) -> str:
        with writing_process(), mock.patch.object(filesystem_async, "_write_item", _die):
            try:
                trained(ASYNCHRONOUS, replace(GIVEN, save=save))
            except CppmegaError as error:
                return f"{error.name}: {error.what}"
        return "trained to its end"

    (said,) = on_ranks(folder, ONE, dying)
    assert said.startswith("checkpoint-writer-died: ") and "exit code 3" in said, said
    assert not tracker.exists(save), "a checkpoint that nobody has written"


def check_what_a_rank_starts_ends_with_it(folder: Path) -> None:
    """Megatron's process for results does not notice that the rank has ended."""

    def sleeper(setting: Configuration) -> int:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid

    (pid,) = on_ranks(folder, ONE, sleeper)
    assert not process.started(pid)


@contextlib.contextmanager
def writing_process() -> Iterator[None]:
    """With a process that writes, as Megatron's start makes one, on a machine without GPU.

    Its results need Megatron's own queue: that of `keep_saves_here` ends at this process.
    """
    with (
        mock.patch.object(torch.cuda, "device_count", lambda: 1),
        mock.patch.object(torch.cuda, "set_device", lambda device: None),
        mock.patch.object(loops, "ready", _start_worker),
        mock.patch.object(filesystem_async, "_results_queue", None),
    ):
        yield


def _start_worker() -> None:
    async_utils.init_persistent_async_worker(0, "fork")


def _die(*given: Any) -> None:
    os._exit(3)
