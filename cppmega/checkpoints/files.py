"""Inspect a checkpoint on disk without torch: whether it is complete, and what must be opened.

Sizes are always compared with the index of the checkpoint, and the checksums of everything that a
rank would unpickle. The checksums of all tensors are compared if that takes a few seconds, or on
request. Nothing is unpickled here but the index; the preflight opens the rest in a process of its
own.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from cppmega.checkpoints.allowed import Damaged, Inert, NotListed, Unpickler
from cppmega.checkpoints.tracker import TRACKER
from cppmega.errors import CppmegaError
from cppmega.host import json_text
from cppmega.host.progress import Advance

AT_ONCE = 1 << 30
"""Bytes whose checksums are compared by default, which takes a few seconds."""
_COMMON = "common_state/shard_0_1"
"""Where Megatron 0.19 keeps everything but tensors; earlier versions use `common.pt`."""
_COMMON_FILE = "common.pt"
_DISTRIBUTED, _INDEX = "metadata.json", ".metadata"
ARCHIVES = (".pt", ".pth")
"""Names of files that `torch.save` writes end so."""
_PICKLES = (".pkl", ".pickle")


class Archive(msgspec.Struct, frozen=True):
    """A file that `torch.save` wrote, or the part of a file, which a rank would unpickle."""

    path: str
    part: str = ""
    offset: int = 0
    length: int | None = None
    """None: all of the file."""
    holds_state: bool = False
    """Whether it holds the arguments of the run that saved it."""


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
class Complete:
    """A checkpoint that has all its bytes."""

    step: str
    archives: tuple[Archive, ...]
    """Everything in it that a rank would unpickle."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    summed: bool = False
    """Whether the checksums of all tensors were compared."""


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


def read(load: Path, *, deep: bool = False, advance: Advance = lambda count: None) -> Complete:
    """Inspect the newest checkpoint of a folder.

    Args:
        load: the folder with the tracker.
        deep: compare the checksums of all tensors, however many there are.
        advance: called with the number of bytes that were compared.

    Raises:
        CppmegaError: `no-checkpoint`, `checkpoint-broken`, `checkpoint-runs-code`.
    """
    step, folder = newest(load)
    files = [path for path in sorted(folder.rglob("*")) if not path.is_dir()]
    for path in files:
        if not path.is_file():
            raise broken(path, "it is not a regular file, and reading it may never end")
    own = _folder(folder, deep, advance) if _is_distributed(folder) else None
    nested = sorted({path.parent for path in files if _is_distributed(path.parent)} - {folder})
    others = [_folder(one, deep, advance).archives for one in nested]
    pickles = [path for path in files if path.name.endswith(ARCHIVES + _PICKLES)]
    if own is None and not any(_of_a_rank(path, folder) for path in pickles):
        shards = any(folder.glob("*.distcp"))
        raise broken(folder, f"{_INDEX} and {_DISTRIBUTED} are missing" * shards or "it is empty")
    summed = deep or sum(path.stat().st_size for path in pickles) <= AT_ONCE
    for path in pickles:
        if path.name.endswith(ARCHIVES) and (summed or path.name == _COMMON_FILE):
            with naming(path):
                _check_sums(path)
    parts = own.archives if own is not None else ()
    common = folder / _COMMON_FILE
    if common in pickles:  # Megatron tries it first, too
        parts = tuple(msgspec.structs.replace(one, holds_state=False) for one in parts)
    archives = [
        Archive(str(path), holds_state=path == common or _of_a_rank(path, folder))
        for path in pickles
    ]
    return Complete(
        step,
        (*archives, *parts, *(one for some in others for one in some)),
        own.shapes if own is not None else {},
        summed and (own is None or own.summed),
    )


def shapes(load: Path) -> Mapping[str, tuple[int, ...]]:
    """Read the shapes of the newest checkpoint's tensors from its index; empty without one.

    Raises:
        CppmegaError: `no-checkpoint`, `checkpoint-broken`, `checkpoint-runs-code`.
    """
    index = newest(load)[1] / _INDEX
    if not index.is_file():
        return {}
    with naming(index):
        return _index(index.read_bytes()).shapes


def _is_distributed(folder: Path) -> bool:
    return (folder / _DISTRIBUTED).is_file() or (folder / _INDEX).is_file()


def _of_a_rank(path: Path, folder: Path) -> bool:
    """Whether a file is a rank's, in the format that is not distributed."""
    return path.match("mp_rank_*/*.pt") and path.parent.parent == folder


def _folder(folder: Path, deep: bool, advance: Advance) -> Complete:
    """Inspect the folder of a distributed checkpoint: the model's, or ModelOpt's inside it."""
    with naming(folder / _DISTRIBUTED):
        backend = _backend(folder)
    if backend not in (None, "torch_dist"):
        return Complete("", ())
    if not (folder / _INDEX).is_file():
        # Megatron writes it last, and copies of `*` leave it out: its name begins with a dot.
        raise broken(folder, f"{_INDEX} is missing")
    with naming(folder / _INDEX):
        index = _index((folder / _INDEX).read_bytes())
    own = (folder / _COMMON_FILE).is_file() or any(part.name == _COMMON for part in index.parts)
    if backend is None and own:
        raise broken(folder, f"{_DISTRIBUTED} is missing")
    _check_sizes(folder, index)
    summed = deep or index.size <= AT_ONCE
    archives = []
    for part in index.parts:
        path = folder / part.file
        if summed or not part.is_tensor:
            with naming(path, part.name):
                _check_sums(io.BytesIO(_bytes(path, part)))
        if not part.is_tensor:
            of_run = part.name == _COMMON
            archives.append(Archive(str(path), part.name, part.offset, part.length, of_run))
        advance(part.length)
    return Complete("", tuple(archives), index.shapes, summed)


def _bytes(path: Path, part: Part) -> bytes:
    with path.open("rb") as file:
        file.seek(part.offset)
        return file.read(part.length)


def _check_sums(source: Path | io.BytesIO) -> None:
    """Compare every part of an archive of `torch.save` with its checksum."""
    try:
        with zipfile.ZipFile(source) as archive:
            torn = archive.testzip()
    except Exception as error:  # a damaged archive raises anything
        raise Damaged(f"it is not an archive of torch.save: {error}") from error
    if torn is not None:
        raise Damaged(f"its part {torn} differs from its checksum")


def _backend(folder: Path) -> str | None:
    """Return the format that `metadata.json` names; None without that file, as with torch_dcp."""
    try:
        content = (folder / _DISTRIBUTED).read_bytes()
        return json_text.decode(content, _Format).sharded_backend
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise Damaged(f"{type(error).__name__}: {error}") from error


def _index(data: bytes) -> Index:
    try:
        metadata = Unpickler(io.BytesIO(data)).load()
        kinds = metadata.field("state_dict_metadata")
        shapes = {
            name: tuple(kind.field("size"))
            for name, kind in kinds.items()
            if kind.name.endswith("TensorStorageMetadata")
        }
        storage = metadata.field("storage_data").items()
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
            raise broken(folder / name, f"it has {there} of its {size} bytes")


@contextmanager
def naming(path: Path, part: str = "") -> Iterator[None]:
    """Turn the damage found in a file into an error that names the file.

    Raises:
        CppmegaError: `checkpoint-broken`, `checkpoint-runs-code`.
    """
    where = f"its part {part}: " if part else ""
    try:
        yield
    except (Damaged, OSError) as damage:
        raise broken(path, f"{where}{damage}") from damage
    except NotListed as other:
        raise CppmegaError(
            "checkpoint-runs-code",
            f"{path}: {where}it names {other}, which no checkpoint of Megatron contains.",
            "Loading it would import and call that in every rank, or fail there. Nothing was run.",
            "load it only if you know who wrote it; if your own run did, keep such objects out of "
            "its arguments, and save again",
        ) from other


def broken(path: Path, what: str) -> CppmegaError:
    """Return the error of a checkpoint that no rank could load."""
    return CppmegaError(
        "checkpoint-broken",
        f"The newest checkpoint cannot be read: {path}: {what[:300]}.",
        "No rank could load it, or training would continue from damaged weights.",
        f"write the step of an older checkpoint into {TRACKER}, or pass another --load",
    )
