"""Remove checkpoints that newer ones replace; a kill at any moment leaves a complete one."""

from __future__ import annotations

import shutil
from pathlib import Path

from cppmega.checkpoints import files, tracker

_LAST_WRITTEN = ".metadata"


def size(folder: Path) -> int:
    """Bytes of the newest checkpoint of a folder.

    Raises:
        CppmegaError: `no-checkpoint`, `checkpoint-broken`.
    """
    _, newest = files.newest(folder)
    return sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())


def keep_newest(folder: Path, count: int) -> list[int]:
    """Remove all but the newest checkpoints, and what older saves have left unfinished.

    Nothing is removed unless the tracker names a checkpoint that is intact: its index and sizes,
    and its checksums if they can be read in seconds. Directories of later steps, which a save in
    progress is writing, and links are left alone.

    Args:
        folder: the folder with the tracker.
        count: how many complete checkpoints stay, at least 1.

    Returns:
        The steps that were removed.

    Raises:
        CppmegaError: what `checkpoint_files.read` raises; nothing was removed.
        OSError: a directory cannot be removed.
    """
    newest = tracker.newest_step(folder)
    if newest is None:
        return []
    files.read(folder)
    older = {
        int(path.name.removeprefix("iter_")): path
        for path in folder.glob("iter_*")
        if path.is_dir() and not path.is_symlink() and path.name.removeprefix("iter_").isdigit()
    }
    older = {step: path for step, path in sorted(older.items()) if step < newest}
    complete = [step for step, path in older.items() if (path / _LAST_WRITTEN).exists()]
    kept = complete[len(complete) - (count - 1) :]
    removed = [step for step in older if step not in kept]
    for step in removed:
        # First the file that marks it as complete: an interrupted removal then leaves only garbage.
        (older[step] / _LAST_WRITTEN).unlink(missing_ok=True)
        shutil.rmtree(older[step])
    return removed
