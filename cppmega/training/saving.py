"""Saves of a run: their duration and size, and the checkpoints that they replace.

Megatron writes a checkpoint and then names it in the tracker. An asynchronous save only copies; the
tracker follows at a later step, when every rank's worker has written.
"""

from __future__ import annotations

import contextlib
import functools
import io
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from cppmega.checkpoints import removal, tracker
from cppmega.errors import CppmegaError
from cppmega.guard import imports
from cppmega.host import durable


class Saves:
    """The saves of one run, on the rank that writes the tracker."""

    def __init__(self, folder: Path, keep: int, say: Callable[[str], None]) -> None:
        """Create the record.

        Args:
            folder: where the run saves.
            keep: how many checkpoints stay; 0: all.
            say: prints a line of the log.
        """
        self._folder, self._keep, self._say = folder, keep, say
        self._pending: dict[int, tuple[float, float]] = {}
        """Step -> when its save began, and the seconds that the training waited for it."""
        self._settling: threading.Thread | None = None
        self._problem: Exception | None = None

    def around_save(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap Megatron's `save_checkpoint`, whose first argument is the step."""

        @functools.wraps(save)
        def saved(iteration: int, *args: Any, **kwargs: Any) -> Any:
            self.wait()
            started = time.perf_counter()
            result = save(iteration, *args, **kwargs)
            waited = time.perf_counter() - started
            self._pending[iteration] = started, waited
            self._settle()
            if iteration in self._pending:
                self._say(
                    f"cppmega: checkpoint of step {iteration}: copied in {waited:.1f} s, for which "
                    "the training waited; it is written while the training continues"
                )
            return result

        return saved

    def around_finalize(self, finalize: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap Megatron's `maybe_finalize_async_save`, which it calls before every step."""

        @functools.wraps(finalize)
        def finalized(*args: Any, **kwargs: Any) -> Any:
            result = finalize(*args, **kwargs)
            if self._pending:
                self._settle()
            return result

        return finalized

    def wait(self) -> None:
        """Wait until replaced checkpoints are removed.

        Raises:
            CppmegaError: `checkpoint-broken`, `checkpoint-not-removed`: nothing replaces the old
                ones, or they cannot be removed.
        """
        if self._settling is not None:
            self._settling.join()
            self._settling = None
        if self._problem is not None:
            raise self._problem

    def _settle(self) -> None:
        """Report the saves that are complete, and remove in the background what they replace."""
        newest = tracker.newest_step(self._folder)
        done = [step for step in self._pending if newest is not None and step <= newest]
        for step in sorted(done):
            self._report(step, *self._pending.pop(step))
        if done and self._keep:
            self.wait()
            self._settling = threading.Thread(target=self._remove, name="checkpoint removal")
            self._settling.start()

    def _report(self, step: int, started: float, waited: float) -> None:
        seconds = time.perf_counter() - started
        gib = removal.size(self._folder) / 2**30
        self._say(
            f"cppmega: checkpoint of step {step}: {gib:.3f} GiB in {seconds:.1f} s "
            f"({gib / max(seconds, 1e-9):.2f} GiB/s), of which the training waited {waited:.1f} s"
        )

    def _remove(self) -> None:
        try:
            for step in removal.keep_newest(self._folder, self._keep):
                self._say(f"cppmega: checkpoint of step {step} removed: a newer one is complete")
        except CppmegaError as error:
            self._problem = error
        except OSError as error:
            self._problem = CppmegaError(
                "checkpoint-not-removed",
                f"A checkpoint that is replaced cannot be removed from {self._folder}: {error}.",
                "Every further one would take more of the disk, until none can be written.",
                f"inspect {self._folder}; --set keep_checkpoints=0 keeps them all",
            )


def replacing_tracker(open_: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the `open` of Megatron's checkpoints: the tracker is replaced, never truncated.

    Megatron truncates it before it writes; a kill in between leaves a folder that nothing loads.
    """

    @functools.wraps(open_)
    def opened(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if mode == "w" and Path(str(path)).name == tracker.TRACKER and "://" not in str(path):
            return _replaced(Path(path))
        return open_(path, mode, *args, **kwargs)

    return opened


@contextlib.contextmanager
def _replaced(path: Path) -> Iterator[IO[str]]:
    with io.StringIO() as text:
        yield text
        durable.replace(path, text.getvalue().encode())


def install(training: Any, checkpointing: Any, saves: Saves | None) -> None:
    """Wrap the functions of Megatron's training that save.

    Args:
        training: the module `megatron.training.training`.
        checkpointing: the module `megatron.training.checkpointing`.
        saves: of the rank that writes the tracker; None: this is another rank.
    """
    storage = getattr(checkpointing, "maybe_msc", None)  # since 0.19
    if storage is None:
        opened = replacing_tracker(checkpointing.open_file)
        imports.replace(checkpointing, "open_file", opened)
    else:
        storage.open = replacing_tracker(storage.open)
    if saves is not None:
        save, finalize = training.save_checkpoint, training.maybe_finalize_async_save
        imports.replace(training, "save_checkpoint", saves.around_save(save))
        imports.replace(training, "maybe_finalize_async_save", saves.around_finalize(finalize))
