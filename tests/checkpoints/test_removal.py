"""Which checkpoints are removed, and when none is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint

from cppmega.checkpoints import removal
from cppmega.checkpoints.tracker import TRACKER
from cppmega.errors import CppmegaError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed", "ignore:TypedStorage")


def saved(folder: Path, steps: dict[int, bool], newest: int) -> Path:
    """A folder with checkpoints, complete or not, and a tracker."""
    for step, complete in steps.items():
        place = folder / f"iter_{step:07d}"
        checkpoint.save({"weight": torch.arange(8)}, checkpoint_id=place, no_dist=True)
        if not complete:
            (place / ".metadata").unlink()
    (folder / TRACKER).write_text(str(newest))
    return folder


def left(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("iter_*"))


@pytest.mark.parametrize(("keep", "removed"), [(1, [1, 2, 3, 4]), (2, [1, 2, 4]), (3, [2, 4])])
def test_the_newest_complete_ones_stay(tmp_path: Path, keep: int, removed: list[int]) -> None:
    """What a save before the newest left unfinished goes; a later save may be under way."""
    folder = saved(tmp_path, {1: True, 2: False, 3: True, 4: False, 5: True, 6: False}, 5)
    assert removal.keep_newest(folder, keep) == removed
    assert left(folder) == [step for step in range(1, 7) if step not in removed]
    assert removal.size(folder) > 64


def test_nothing_is_removed_for_one_that_is_broken(tmp_path: Path) -> None:
    folder = saved(tmp_path, {1: True, 2: True}, 2)
    shard = next((folder / "iter_0000002").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CppmegaError, match="checkpoint-broken"):
        removal.keep_newest(folder, 1)
    assert left(folder) == [1, 2]


def test_a_link_stays_and_so_does_everything_without_a_tracker(tmp_path: Path) -> None:
    folder = saved(tmp_path / "own", {2: True}, 2)
    elsewhere = saved(tmp_path / "other", {1: True}, 1)
    (folder / "iter_0000001").symlink_to(elsewhere / "iter_0000001")
    assert removal.keep_newest(folder, 1) == [] and left(folder) == [1, 2]
    (elsewhere / TRACKER).unlink()
    assert removal.keep_newest(elsewhere, 1) == [] and left(elsewhere) == [1]
