"""Checkpoints of the loop on CPU, in megatron-core's format and under Megatron's own names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cppmega.checkpoints.tracker import TRACKER
from cppmega.overlay import record as overlay_record
from cppmega.overlay.record import OverlayRecord
from cppmega.proof.cpu_shims import keep_saves_here


def save(folder: Path, model: Any, optimizer: Any, step: int, record: OverlayRecord) -> None:
    """Write a checkpoint next to the others; it is valid once the tracker file names it.

    Nothing is ever removed: what a killed run left unfinished is kept under another name.
    """
    import torch
    from megatron.core import dist_checkpointing

    keep_saves_here()
    place, unfinished = folder / f"iter_{step:07d}", folder / f"iter_{step:07d}.unfinished"
    first = torch.distributed.get_rank() == 0
    if first:
        if unfinished.exists():
            unfinished.rename(_free(unfinished))
        unfinished.mkdir(parents=True)
    torch.distributed.barrier()
    state = {
        "model": model.sharded_state_dict(prefix="model."),
        "optimizer": optimizer.state_dict(),
        "step": step,
        "cppmega": overlay_record.dump(record),
    }
    dist_checkpointing.save(state, str(unfinished))
    torch.distributed.barrier()
    if first:
        if place.exists():
            place.rename(_free(place))
        unfinished.rename(place)
        tracker = folder / (TRACKER + ".new")
        tracker.write_text(str(step))
        tracker.replace(folder / TRACKER)
        print(f"cppmega: checkpoint of step {step} in {folder}", flush=True)
    torch.distributed.barrier()


def load(folder: Path, model: Any, optimizer: Any, record: OverlayRecord | None = None) -> int:
    """Load the newest checkpoint of a folder; return its number of steps, 0 without a checkpoint.

    Args:
        record: of the overlay that training resumes with, to report what differs; None: silent.
    """
    import torch
    from megatron.core import dist_checkpointing

    tracker = folder / TRACKER
    if not tracker.exists():
        return 0
    step = int(tracker.read_text())
    template = {"model": model.sharded_state_dict(prefix="model."), "step": 0}
    state = dist_checkpointing.load(template, str(folder / f"iter_{step:07d}"))
    model.load_state_dict({k.removeprefix("model."): v for k, v in state["model"].items()})
    optimizer.load_state_dict(state["optimizer"])
    then = overlay_record.parse(state.get("cppmega"))
    line = overlay_record.remark_on_checkpoint(then, record) if record is not None else ""
    if line and torch.distributed.get_rank() == 0:
        print(line, flush=True)
    return int(state["step"])


def _free(path: Path) -> Path:
    """Find a name next to it that is not taken yet."""
    number = 1
    while (path.parent / f"{path.name}.{number}").exists():
        number += 1
    return path.parent / f"{path.name}.{number}"
