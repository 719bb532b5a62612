"""A checkpoint on disk, looked at without torch: is it whole, and what is it a checkpoint of?

Sizes are always compared with the index of the checkpoint, and everything that a rank would
unpickle is gone through without running any of it. The checksums of all tensors are compared where
that is a matter of seconds, or when it is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cppmega.checkpoints import inert_pickle, saved_archive
from cppmega.checkpoints.inert_pickle import Inert, NotListed
from cppmega.checkpoints.saved_archive import Damaged
from cppmega.checkpoints.tracker import TRACKER
from cppmega.errors import CppmegaError
from cppmega.host.progress import Advance

"""Megatron writes it when a checkpoint is whole."""
AT_ONCE = 1 << 30
"""Bytes whose checksums are compared without being asked to: a few seconds."""
_COMMON = "common_state/shard_0_1"
"""Where Megatron keeps what is not a tensor, from 0.19 on; before, in `common.pt`."""
_DISTRIBUTED, _INDEX = "metadata.json", ".metadata"


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor's shard, or one object, in a file of a distributed checkpoint."""

    name: str
    file: str
    offset: int
    length: int
    is_tensor: bool


@dataclass(frozen=True, slots=True)
class Index:
    """What `.metadata` says."""

    parts: tuple[Part, ...] = ()
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of all parts."""
        return sum(part.length for part in self.parts)


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that was found whole."""

    step: str
    state: Mapping[str, Any]
    """What is not a tensor; stand-ins for its objects."""
    shapes: Mapping[str, tuple[int, ...]]
    summed: bool
    """Whether the checksums of all tensors were compared."""

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Megatron's arguments of the run that saved it; empty where it has none."""
        args = self.state.get("args")
        state = args.state if isinstance(args, Inert) else None
        return {k: inert_pickle.plain(v) for k, v in state.items()} if state else {}


def newest(load: Path) -> tuple[str, Path]:
    """The step that a folder's tracker names, and its folder.

    Raises:
        CppmegaError: `no-checkpoint`, `checkpoint-broken`.
    """
    tracker = load / TRACKER
    if not tracker.is_file():
        raise CppmegaError(
            "no-checkpoint",
            f"{load} holds no finished checkpoint ({TRACKER} is missing).",
            "Megatron would warn and train on from random weights.",
            "correct --load, or leave it out for a fresh start",
        )
    said = tracker.read_text(errors="replace").strip()
    is_step = said.isascii() and said.isdigit() and len(said) < 19
    step = f"iter_{int(said):07d}" if is_step else "release"
    if (is_step or said == "release") and (load / step).is_dir():
        return said, load / step
    there = sorted(path.name for path in load.glob("iter_*") if path.is_dir())
    what = f"{load / step} is not there" if is_step or said == "release" else "that is not a step"
    raise CppmegaError(
        "checkpoint-broken",
        f"{tracker} names step {said[:40]!r}, and {what}.",
        "Every rank would end when it loads it.",
        f"write the step of another checkpoint into that file (there: {', '.join(there)}), or "
        "another --load"
        if there
        else "another --load, or none for a fresh start",
    )


def read(load: Path, *, deep: bool = False, advance: Advance = lambda count: None) -> Saved:
    """Look at the newest checkpoint of a folder.

    Args:
        load: the folder with the tracker.
        deep: compare the checksums of all tensors, however many there are.
        advance: told how many bytes were compared.

    Raises:
        CppmegaError: `no-checkpoint`, `checkpoint-broken`, `checkpoint-runs-code`.
    """
    step, folder = newest(load)
    if (folder / _DISTRIBUTED).is_file() or (folder / _INDEX).is_file():
        return _distributed(step, folder, deep, advance)
    ranks = sorted(folder.glob("mp_rank_*/*.pt"))
    if not ranks:
        shards = any(folder.glob("*.distcp"))
        raise _broken(folder, f"{_INDEX} and {_DISTRIBUTED} are missing" * shards or "it is empty")
    summed = deep or sum(path.stat().st_size for path in ranks) <= AT_ONCE
    states = [_state_of_file(path, summed) for path in ranks]
    return Saved(step, next((one for one in states if "args" in one), {}), {}, summed)


def shapes(load: Path) -> Mapping[str, tuple[int, ...]]:
    """Shapes of the newest checkpoint's tensors, by its index alone; empty where it has none.

    Raises:
        CppmegaError: `no-checkpoint`, `checkpoint-broken`, `checkpoint-runs-code`.
    """
    index = newest(load)[1] / _INDEX
    if not index.is_file():
        return {}
    with _naming(index):
        return _index(index.read_bytes()).shapes


def _state_of_file(path: Path, summed: bool) -> Mapping[str, Any]:
    with _naming(path), path.open("rb") as file:
        if summed:
            saved_archive.check(file)
        state = inert_pickle.load_archive(file)
    return state if isinstance(state, dict) else {}


def _distributed(step: str, folder: Path, deep: bool, advance: Advance) -> Saved:
    with _naming(folder / _DISTRIBUTED):
        backend = _backend(folder)
    if backend not in (None, "torch_dist"):
        return Saved(step, _common(folder, Index()), {}, False)
    if not (folder / _INDEX).is_file():
        # Megatron writes it last, and an interrupted copy leaves it out: its name has a dot.
        raise _broken(folder, f"{_INDEX} is missing")
    with _naming(folder / _INDEX):
        index = _index((folder / _INDEX).read_bytes())
    own = (folder / "common.pt").is_file() or any(part.name == _COMMON for part in index.parts)
    if backend is None and own:
        raise _broken(folder, f"{_DISTRIBUTED} is missing")
    _check_sizes(folder, index)
    summed = deep or index.size <= AT_ONCE
    for part in index.parts:
        _check_part(folder, part, summed)
        advance(part.length)
    return Saved(step, _common(folder, index), index.shapes, summed)


def _backend(folder: Path) -> str | None:
    """The format that `metadata.json` names; None: there is no such file, as with torch_dcp."""
    try:
        return str(json.loads((folder / _DISTRIBUTED).read_text())["sharded_backend"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{type(error).__name__}: {error}") from error


def _index(data: bytes) -> Index:
    try:
        found = inert_pickle.loads(data)
        kinds = found.field("state_dict_metadata")
        shapes = {
            name: tuple(kind.field("size"))
            for name, kind in kinds.items()
            if kind.name.endswith("TensorStorageMetadata")
        }
        storage = found.field("storage_data").items()
        return Index(tuple(_part(key, value, shapes) for key, value in storage), shapes)
    except NotListed:
        raise
    except Exception as error:  # a damaged pickle raises anything
        raise Damaged(f"{type(error).__name__}: {error}") from error


def _part(key: Inert, value: Inert, shapes: Mapping[str, Any]) -> Part:
    name, file = str(key.field("fqn")), str(value.field("relative_path"))
    offset, length = int(value.field("offset")), int(value.field("length"))
    if Path(file).name != file or offset < 0 or length < 0:
        raise ValueError(f"{name} is at byte {offset} of {file!r}")
    return Part(name, file, offset, length, name in shapes)


def _check_sizes(folder: Path, index: Index) -> None:
    needs: dict[str, int] = {}
    for part in index.parts:
        needs[part.file] = max(needs.get(part.file, 0), part.offset + part.length)
    for name, size in sorted(needs.items()):
        there = (folder / name).stat().st_size if (folder / name).is_file() else 0
        if there < size:
            raise _broken(folder / name, f"it has {there} of its {size} bytes")


def _check_part(folder: Path, part: Part, summed: bool) -> None:
    """A tensor by its checksum, if at all: torch reads it as numbers. An object is unpickled."""
    if part.is_tensor and not summed:
        return
    path = folder / part.file
    with _naming(path, part.name), saved_archive.window(path, part.offset, part.length) as file:
        saved_archive.check(file)
        if not part.is_tensor:
            inert_pickle.load_archive(file)


def _common(folder: Path, index: Index) -> Mapping[str, Any]:
    """What is not a tensor; Megatron looks for the file first."""
    path = folder / "common.pt"
    state: Any = {}
    if path.is_file():
        return _state_of_file(path, summed=True)
    for part in index.parts:
        if part.name == _COMMON:
            with saved_archive.window(folder / part.file, part.offset, part.length) as file:
                state = inert_pickle.load_archive(file)
    if isinstance(state, list) and state:
        state = state[0]
    return state if isinstance(state, dict) else {}


@contextmanager
def _naming(path: Path, part: str = "") -> Iterator[None]:
    """Turn what is found in a file into an error that names it."""
    where = f"its part {part}: " if part else ""
    try:
        yield
    except (Damaged, OSError) as damage:
        raise _broken(path, f"{where}{damage}") from damage
    except NotListed as other:
        raise CppmegaError(
            "checkpoint-runs-code",
            f"{path}: {where}it names {other}, which no checkpoint of Megatron holds.",
            "Loading it would import and call that in every rank, or fail there. Nothing of it was "
            "run here.",
            "do not load it unless you know who wrote it; if your own run did, keep such objects "
            "out of its arguments, and save again",
        ) from other


def _broken(path: Path, what: str) -> CppmegaError:
    return CppmegaError(
        "checkpoint-broken",
        f"The newest checkpoint cannot be read: {path}: {what[:300]}.",
        "Every rank would end when it loads it, or train on from damaged weights.",
        f"write the step of an older checkpoint of that folder into {TRACKER}, or another --load",
    )
