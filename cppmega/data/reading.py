"""Read a complete dataset once: every number of its index, every id, and its hashes.

Files are read rather than mapped: one that shrinks meanwhile is an error, and does not end the
process with SIGBUS.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cppmega.data import corpus, index_file
from cppmega.data import record as data_record
from cppmega.data.corpus import Corpus
from cppmega.data.record import Reading
from cppmega.errors import CppmegaError
from cppmega.host import progress
from cppmega.host.progress import Advance

if TYPE_CHECKING:
    import numpy as np

_BLOCK = 1 << 16
"""Bytes whose ids are compared together."""
_CHUNK = 1 << 23
"""Bytes read together; a multiple of a block."""
_LEARN = 2.0
"""Seconds of reading after which the rest is estimated."""


class TooLong(Exception):  # noqa: N818  (an answer, not an error)
    """Reading all of it would take longer than allowed."""

    def __init__(self, seconds: float, speed: float) -> None:
        self.seconds, self.speed = seconds, speed
        super().__init__(f"{seconds:.0f} s at {speed / 1e9:.2f} GB/s")


def check(dataset: Corpus, reading: Reading, vocab_size: int) -> None:
    """Check that what was read can be trained on.

    Raises:
        CppmegaError: `token-out-of-vocabulary`, `data-changed`, `data-broken`.
    """
    corpus.check_id(dataset, reading.highest, reading.highest_at, vocab_size)
    corpus.check_id(dataset, reading.lowest, reading.lowest_at, vocab_size)
    card = dataset.card
    if card is not None:
        if (card.bin_sha256, card.idx_sha256) != (reading.bin_sha256, reading.idx_sha256):
            raise CppmegaError(
                "data-changed",
                f"{dataset.prefix} is not what its card describes: its hash is different.",
                "The run would be filed under the fingerprint of other data.",
                "prepare the data again, under another name",
            )
    elif reading.zeros and not reading.zeros_are_data:
        raise CppmegaError(
            "data-broken",
            f"{dataset.data_file} has {reading.zeros} blocks of 64 KiB that are all zeros.",
            "An unfinished download or copy looks like that, and would be trained on.",
            "compare it with its source; if token 0 fills them: "
            f"python -m cppmega.check_data --zeros-are-data {dataset.prefix}",
        )


def check_unread(dataset: Corpus, vocab_size: int) -> None:
    """Check as much as possible without reading all of a dataset: its index, and both ends.

    Raises:
        CppmegaError: `data-broken`, `token-out-of-vocabulary`.
    """
    index_file.check_all(dataset.index, dataset.data_file.stat().st_size)
    corpus.check_ids(dataset, vocab_size)


def read(
    dataset: Corpus,
    *,
    advance: Advance = lambda count: None,
    seconds: float | None = None,
    zeros_are_data: bool = False,
) -> Reading:
    """Read all of a dataset, and keep the result.

    Args:
        dataset: the dataset.
        advance: called with the bytes read.
        seconds: what it may take; None: unlimited.
        zeros_are_data: whether blocks of zeros are meant to be trained on.

    Raises:
        CppmegaError: `data-broken`, `data-being-written`, `data-not-readable`.
        TooLong: it would take more than `seconds`.
    """
    start, before = time.monotonic(), data_record.states(dataset)
    index_file.check_all(dataset.index, dataset.data_file.stat().st_size)
    with index_file.readable(dataset.index.path), dataset.index.path.open("rb") as file:
        index_hash = hashlib.file_digest(file, "sha256").hexdigest()
    advance(dataset.index.path.stat().st_size)
    with ThreadPoolExecutor(1) as hashing:
        ids = _Ids(dataset, hashing)
        for chunk in _chunks(dataset):
            ids.add(chunk)
            advance(len(chunk))
            _refuse_too_long(start, ids.bytes, dataset, seconds)
    reading = Reading(
        lowest=ids.lowest,
        lowest_at=ids.lowest_at,
        highest=ids.highest,
        highest_at=ids.highest_at,
        zeros=ids.zeros,
        bin_sha256=ids.hash.hexdigest(),
        idx_sha256=index_hash,
        data=data_record.stamp(dataset.data_file),
        index=data_record.stamp(dataset.index.path),
        seconds=time.monotonic() - start,
        zeros_are_data=zeros_are_data,
    )
    if data_record.states(dataset) != before:
        raise _being_written(dataset)
    data_record.keep(dataset.prefix, reading)
    return reading


class Allowance:
    """Time for the first reading of datasets; those that would take longer are left out."""

    def __init__(self, seconds: float | None, say: Callable[[str], None]) -> None:
        """Create the allowance.

        Args:
            seconds: for all datasets together; None: unlimited.
            say: called with the progress every ten seconds.
        """
        self._left, self._say = seconds, say
        self.left_out: dict[Path, TooLong] = {}
        self.read_now: list[Reading] = []

    def read(self, dataset: Corpus) -> Reading | None:
        """The result of an earlier reading, or of this one; None if there is no time for it."""
        known = data_record.kept(dataset)
        if known is not None:
            return known
        start = time.monotonic()
        try:
            telling = progress.lines(f"reading {dataset.prefix}", dataset.size, self._say)
            reading = read(dataset, advance=telling, seconds=self._left)
        except TooLong as too_long:
            self.left_out[dataset.prefix] = too_long
            return None
        finally:
            if self._left is not None:
                self._left = max(0.0, self._left - (time.monotonic() - start))
        self.read_now.append(reading)
        return reading


class _Ids:
    """The range of all ids of a data file so far."""

    def __init__(self, dataset: Corpus, hashing: ThreadPoolExecutor) -> None:
        self._dataset, self._hashing = dataset, hashing
        self.hash = hashlib.sha256()
        self.bytes = self.zeros = 0
        self.lowest, self.lowest_at = 2**63, 0
        self.highest, self.highest_at = -(2**63), 0

    def add(self, chunk: np.ndarray[Any, Any]) -> None:
        """Add the next bytes of the file."""
        hashed = self._hashing.submit(self.hash.update, chunk)  # it releases the interpreter lock
        in_a_block = _BLOCK // self._dataset.index.token_bytes
        ids = chunk.view(self._dataset.dtype)
        whole = len(ids) // in_a_block * in_a_block
        first = self.bytes // self._dataset.index.token_bytes
        if whole:
            lows, highs = self._compare(ids[:whole].reshape(-1, in_a_block), first)
            self.zeros += int(((lows == 0) & (highs == 0)).sum())
        if whole < len(ids):
            self._compare(ids[whole:].reshape(1, -1), first + whole)
        hashed.result()
        self.bytes += len(chunk)

    def _compare(self, blocks: np.ndarray[Any, Any], first: int) -> tuple[Any, Any]:
        """The lowest and the highest id of each block."""
        import numpy as np

        lows, highs = blocks.min(axis=1), blocks.max(axis=1)
        if int(lows.min()) < self.lowest:
            self.lowest, self.lowest_at = int(lows.min()), first + int(np.argmin(blocks))
        if int(highs.max()) > self.highest:
            self.highest, self.highest_at = int(highs.max()), first + int(np.argmax(blocks))
        return lows, highs


def _chunks(dataset: Corpus) -> Iterator[np.ndarray[Any, Any]]:
    """Read the bytes of the data."""
    import numpy as np

    left = dataset.tokens * dataset.index.token_bytes
    with index_file.readable(dataset.data_file), dataset.data_file.open("rb") as file:
        while left:
            chunk = np.fromfile(file, np.uint8, count=min(_CHUNK, left))
            if len(chunk) < min(_CHUNK, left):
                raise _being_written(dataset)
            yield chunk
            left -= len(chunk)


def _being_written(dataset: Corpus) -> CppmegaError:
    return CppmegaError(
        "data-being-written",
        f"{dataset.prefix} changed while it was read.",
        "Every rank would read a different state of it.",
        "wait until the process that writes it has ended",
    )


def _refuse_too_long(start: float, done: int, dataset: Corpus, seconds: float | None) -> None:
    elapsed = time.monotonic() - start
    if seconds is None or elapsed < min(_LEARN, seconds):
        return
    speed = (done + dataset.index.path.stat().st_size) / elapsed
    whole = dataset.size / speed
    if whole > seconds:
        raise TooLong(whole, speed)
