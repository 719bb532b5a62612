"""The result of reading a complete dataset, kept next to the data for later launches.

It is in `PREFIX.checked.json`, or in the user's cache if the folder of the data cannot be written,
and is valid for as long as both files have the size, the modification time and the sampled hash
that they had then: a later launch reads a few MiB of them.

The sample is 32 blocks of 64 KiB, evenly spaced. Other bytes under the same size and time, which
takes a tool that restores times, are detected with certainty if they are one stretch longer than a
31st of the file, and otherwise with 32 times the probability of hitting it with one block; a file
of up to 2 MiB is compared completely.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec

from cppmega.data.corpus import Corpus, with_suffix
from cppmega.host import durable, json_text
from cppmega.tree import wheels

_SCHEMA = 1
_BLOCK = 1 << 16
_SAMPLES = 32

Position = Annotated[int, msgspec.Meta(ge=0)]


class Stamp(msgspec.Struct, frozen=True):
    """The identity of a file, known without reading all of it."""

    size: Position
    changed: int
    """Time of the last change, ns."""
    sample: str


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a complete dataset."""

    lowest: int
    lowest_at: Position
    highest: int
    highest_at: Position
    """Position of the first such token."""
    zeros: Position
    """Blocks of 64 KiB with nothing but zeros, which an unfinished copy leaves."""
    bin_sha256: str
    idx_sha256: str
    data: Stamp
    index: Stamp
    seconds: float
    zeros_are_data: bool = False
    """Confirmed by the user, with `--zeros-are-data`."""
    schema: int = _SCHEMA

    @property
    def speed(self) -> float:
        """Bytes per second."""
        return (self.data.size + self.index.size) / max(self.seconds, 1e-9)


def kept(dataset: Corpus) -> Reading | None:
    """The result of an earlier reading, if both files are still the ones that were read."""
    for place in _places(dataset.prefix):
        reading = _load(place)
        if reading is not None and _unchanged(dataset, reading):
            return reading
    return None


def name(dataset: Corpus) -> str:
    """One name for the content of a dataset: its card's, else a hash of a sample."""
    if dataset.card is not None:
        return dataset.card.fingerprint
    both = sample(dataset.data_file) + sample(dataset.index.path)
    return hashlib.sha256(both.encode()).hexdigest()[:16]


def states(dataset: Corpus) -> list[tuple[int, int]]:
    """Size and time of the last change of both files."""
    stats = [path.stat() for path in (dataset.data_file, dataset.index.path)]
    return [(stat.st_size, stat.st_mtime_ns) for stat in stats]


def stamp(path: Path) -> Stamp:
    """Identify a file from now on."""
    stat = path.stat()
    return Stamp(stat.st_size, stat.st_mtime_ns, sample(path))


def sample(path: Path) -> str:
    """A hash of the size and of evenly spaced blocks, the first and the last among them."""
    size, digest = path.stat().st_size, hashlib.sha256()
    digest.update(str(size).encode())
    if size <= _SAMPLES * _BLOCK:
        digest.update(path.read_bytes())
        return digest.hexdigest()
    with path.open("rb", buffering=0) as file:
        for number in range(_SAMPLES):
            digest.update(
                os.pread(file.fileno(), _BLOCK, (size - _BLOCK) * number // (_SAMPLES - 1))
            )
    return digest.hexdigest()


def _unchanged(dataset: Corpus, reading: Reading) -> bool:
    pairs = ((dataset.data_file, reading.data), (dataset.index.path, reading.index))
    before = [(then.size, then.changed) for _, then in pairs]
    return before == states(dataset) and all(sample(path) == then.sample for path, then in pairs)


def _places(prefix: Path) -> tuple[Path, Path]:
    """Next to the data, and in the user's cache."""
    own = hashlib.sha256(os.fsencode(prefix.resolve())).hexdigest()[:24]
    return with_suffix(prefix, ".checked.json"), wheels.cache() / "data" / f"{own}.json"


def _load(place: Path) -> Reading | None:
    """Read a record; None if there is none, or it is damaged or another release's."""
    try:
        raw = json_text.read(place)
        seal = raw.pop("seal")
        if seal != _seal(raw) or raw["schema"] != _SCHEMA:
            return None
        return msgspec.convert(raw, Reading)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _seal(record: Mapping[str, Any]) -> str:
    """Hash the text of a record: one that was damaged or edited is not valid."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def keep(prefix: Path, reading: Reading) -> None:
    """Write the record to the first place that can be written."""
    record = msgspec.to_builtins(reading)
    text = json.dumps({**record, "seal": _seal(record)}, indent=1) + "\n"
    for place in _places(prefix):
        with suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            durable.replace(place, text.encode())
            return
