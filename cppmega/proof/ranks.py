"""Two gloo ranks for a proof: forks of its process, which has imported all."""

from __future__ import annotations

import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from cppmega.host import process
from cppmega.proof import cpu_shims

PATIENCE = timedelta(seconds=60)
"""How long a rank waits for the other one, which may have failed."""


def on_two(work: Callable[[int], Any], context: int = 1) -> list[Any]:
    """Return what `work(rank)` returns on each of two ranks, with Megatron's groups in place.

    Args:
        work: runs in a fork of this process.
        context: context-parallel size; the ranks are tensor-parallel if it is 1.

    Raises:
        AssertionError: with the traceback of a rank that failed.
    """
    import torch

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        children = []
        for rank in range(2):
            if not (child := os.fork()):
                _be(rank, folder, work, context)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        errors = [file.read_text() for file in sorted(folder.glob("*.error"))]
        assert not errors, "\n".join(errors)
        return [torch.load(folder / f"{rank}.answer") for rank in range(2)]


def _be(rank: int, folder: Path, work: Callable[[int], Any], context: int) -> None:
    """Run one rank to its end; its answer is a file, and so is what it failed with."""
    import torch

    try:
        process.end_with_parent(number=signal.SIGKILL)
        torch.set_num_threads(1)
        store = f"file://{folder}/store"
        torch.distributed.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=2, timeout=PATIENCE
        )
        cpu_shims.init_distributed(tensor=2 // context, context=context)
        torch.save(work(rank), folder / f"{rank}.answer")
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
    os._exit(0)
