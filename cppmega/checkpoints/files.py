"""Inspect a checkpoint on disk without torch: whether it is intact, and what it contains.

Sizes are always compared with the index of the checkpoint, and everything that a rank would
unpickle is read without running any of it. The checksums of all tensors are compared if that takes
a few seconds, or on request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from cppmega.checkpoints import inert_pickle, saved_archive
from cppmega.checkpoints.inert_pickle import Inert, NotListed
from cppmega.checkpoints.saved_archive import Damaged
from cppmega.checkpoints.tracker import TRACKER
from cppmega.errors import CppmegaError
from cppmega.host.progress import Advance

AT_ONCE = 1 << 30
"""Bytes whose checksums are compared by default, which takes a few seconds."""
_COMMON = "common_state/shard_0_1"
"""Where Megatron 0.19 keeps everything but tensors; earlier versions use `common.pt`."""
_DISTRIBUTED, _INDEX = "metadata.json", ".metadata"


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor's shard, or one object, in a file of a distributed checkpoint."""

    name: str
    file: str
    offset: int
    length: int
    is_tensor: bool


class _Format(msgspec.Struct, frozen=True):
    """The field of `metadata.json` that is read."""

    sharded_backend: str


@dataclass(frozen=True, slots=True)
class Index:
    """The content of `.metadata`."""

    parts: tuple[Part, ...] = ()
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of all parts."""
        return sum(part.length for part in self.parts)


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that was found intact."""

    step: str
    state: Mapping[str, Any]
    """Everything except tensors, with stand-ins for objects."""
    shapes: Mapping[str, tuple[int, ...]]
    summed: bool
    """Whether the checksums of all tensors were compared."""

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Megatron's arguments of the run that saved it; empty if it has none."""
        args = self.state.get("args")
        state = args.state if isinstance(args, Inert) else None
        return {k: inert_pickle.plain(v) for k, v in state.items()} if state else {}


def newest(load: Path) -> tuple[str, Path]:
    """Return the step that a folder's tracker names, and the folder of that step.

    Raises:
        CppmegaError: `no-checkpoint`, `checkpoint-broken`.
    """
    tracker = load / TRACKER
    if not tracker.is_file():
        raise CppmegaError(
            "no-checkpoint",
            f"{load} holds no finished checkpoint ({TRACKER} is missing).",
            "Megatron would only log a warning and train from random weights.",
            "correct --load, or leave it out for a fresh start",
        )
    name = tracker.read_text(errors="replace").strip()
    is_step = name.isascii() and name.isdigit() and len(name) < 19
    step = f"iter_{int(name):07d}" if is_step else "release"
    if (is_step or name == "release") and (load / step).is_dir():
        return name, load / step
    there = sorted(path.name for path in load.glob("iter_*") if path.is_dir())
    problem = f"{load / step} is missing" if is_step or name == "release" else "that is not a step"
    raise CppmegaError(
        "checkpoint-broken",
        f"{tracker} names step {name[:40]!r}, but {problem}.",
        "No rank could load it.",
        f"write the step of another checkpoint into that file (found: {', '.join(there)}), or pass "
        "another --load"
        if there
        else "pass another --load, or none for a fresh start",
    )


def read(load: Path, *, deep: bool = False, advance: Advance = lambda count: None) -> Saved:
    """Inspect the newest checkpoint of a folder.

    Args:
        load: the folder with the tracker.
        deep: compare the checksums of all tensors, however many there are.
        advance: called with the number of bytes that were compared.

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
    """Read the shapes of the newest checkpoint's tensors from its index; empty without one.

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
        # Megatron writes it last, and copies of `*` leave it out: its name begins with a dot.
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
    """Return the format that `metadata.json` names; None without that file, as with torch_dcp."""
    try:
        content = (folder / _DISTRIBUTED).read_bytes()
        return msgspec.json.decode(content, type=_Format).sharded_backend
    except FileNotFoundError:
        return None
    except ValueError as error:
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
    """Check a tensor's checksum if requested, and always an object, which a rank would unpickle."""
    if part.is_tensor and not summed:
        return
    path = folder / part.file
    with _naming(path, part.name), saved_archive.window(path, part.offset, part.length) as file:
        saved_archive.check(file)
        if not part.is_tensor:
            inert_pickle.load_archive(file)


def _common(folder: Path, index: Index) -> Mapping[str, Any]:
    """Return everything but tensors; Megatron tries the file first, too."""
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
    """Turn the damage found in a file into an error that names the file."""
    where = f"its part {part}: " if part else ""
    try:
        yield
    except (Damaged, OSError) as damage:
        raise _broken(path, f"{where}{damage}") from damage
    except NotListed as other:
        raise CppmegaError(
            "checkpoint-runs-code",
            f"{path}: {where}it names {other}, which no checkpoint of Megatron contains.",
            "Loading it would import and call that in every rank, or fail there. Nothing was run.",
            "load it only if you know who wrote it; if your own run did, keep such objects out of "
            "its arguments, and save again",
        ) from other


def _broken(path: Path, what: str) -> CppmegaError:
    return CppmegaError(
        "checkpoint-broken",
        f"The newest checkpoint cannot be read: {path}: {what[:300]}.",
        "No rank could load it, or training would continue from damaged weights.",
        f"write the step of an older checkpoint into {TRACKER}, or pass another --load",
    )
