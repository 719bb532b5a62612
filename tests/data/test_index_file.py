"""Any number of an index that is wrong is found, or does not change what is trained on."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cppmega.data import corpus, index_file
from cppmega.data.corpus import with_suffix
from cppmega.errors import CppmegaError
from tests.support.datasets import CODES, write

IDS = [5, 6, 7, 8, 9, 40_000, 1, 2]
LENGTHS = [3, 0, 4, 1]


def checked(prefix: Path) -> corpus.Corpus:
    """Everything that is looked at in an index."""
    found = corpus.open_(prefix)
    index_file.check_all(found.index, found.data_file.stat().st_size)
    return found


def said(prefix: Path) -> str:
    """What is wrong with a dataset."""
    with pytest.raises(CppmegaError) as caught:
        checked(prefix)
    assert caught.value.name == "data-broken", caught.value.render()
    return caught.value.what


def test_what_the_builder_writes_is_right(tmp_path: Path) -> None:
    found = checked(write(tmp_path / "good", IDS, LENGTHS))
    assert (found.tokens, found.documents, found.dtype) == (8, 4, "uint16")
    several = write(tmp_path / "several", IDS, LENGTHS, documents=[0, 2, 2, 4])
    assert checked(several).documents == 3
    assert checked(write(tmp_path / "modes", IDS, LENGTHS, modes=[0] * 4)).index.has_modes


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"lengths": [3, -2, 6, 1]}, "sequence 1 has -2 tokens"),
        ({"lengths": [4, 0, 4, 1], "pointers": [0, 6, 6, 14]}, "one before it ends at byte 8"),
        ({"pointers": [0, 6, 4, 14]}, "sequence 2 begins at byte 4 of the data"),
        ({"pointers": [0, 6, 8, 14]}, "sequence 2 begins at byte 8 of the data"),
        ({"pointers": [0, 2**62, 6, 14]}, "sequence 1 begins at byte 4611686018427387904"),
        ({"pointers": [2, 6, 6, 14]}, "its first sequence begins at byte 2"),
        ({"documents": [0, 3, 1, 4]}, "document 2 begins at sequence 1, before"),
        ({"documents": [0, 2**62, 4]}, "document 2 begins at sequence 4, before"),
        ({"documents": [0, -1, 4]}, "document 1 begins at sequence -1, before"),
        ({"documents": [0, 1, 3]}, "cover the sequences 0 to 3, and there are 4"),
        ({"documents": [1, 2, 4]}, "cover the sequences 1 to 4"),
        ({"documents": []}, "its document index is empty"),
        ({"modes": [0, 0, 1, 0]}, "sequence 2 has mode 1"),
        ({"modes": [0, 0]}, "it has 124 bytes; its header, of 4 sequences and 4 documents"),
        ({"head": {"sequences": 2**60}}, "implies"),
        ({"head": {"documents": 2**63}}, "implies"),
        ({"head": {"version": 2}}, "not the index of a Megatron dataset"),
        ({"head": {"magic": b"MMIDIDY\x00\x00"}}, "not the index of a Megatron dataset"),
        ({"head": {"code": 7}}, "floating-point"),
        ({"head": {"code": 9}}, "unknown type 9"),
        ({"head": {"code": 4}}, "its last sequence ends at byte 18, and the data file has 16"),
    ],
)
def test_one_wrong_number(tmp_path: Path, how: dict[str, Any], words: str) -> None:
    assert words in said(write(tmp_path / "bad", IDS, **{"lengths": LENGTHS, **how}))


def test_a_data_file_that_is_not_the_indexes(tmp_path: Path) -> None:
    prefix = write(tmp_path / "data", IDS, LENGTHS)
    data = with_suffix(prefix, ".bin")
    whole = data.read_bytes()
    for other in (whole[:-2], whole + b"\0\0", whole[:-1], whole + b"\0"):
        data.write_bytes(other)
        assert f"the data file has {len(other)}" in said(prefix)
    data.write_bytes(b"")
    said(prefix)


def test_an_index_of_nothing(tmp_path: Path) -> None:
    assert "no tokens" in said(write(tmp_path / "none", [], []))
    assert "no tokens" in said(write(tmp_path / "empty", [], [0, 0]))


def test_lists_longer_than_a_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_file, "_AT_ONCE", 3)
    lengths = [1, 2, 3, 4, 5, 6, 7]
    prefix = write(tmp_path / "data", range(28), lengths)
    checked(prefix)
    write(prefix, range(28), lengths, documents=[0, 1, 2, 3, 2, 5, 6, 7])
    assert "document 4" in said(prefix)
    write(prefix, range(28), lengths, pointers=[0, 2, 6, 12, 22, 30, 42])
    assert "sequence 4 begins at byte 22" in said(prefix)


def trained_on(index: bytes, data: bytes) -> Any:
    """What Megatron makes of both files; it looks at magic, version and type alone.

    Its GPT dataset takes sequences and leaves the document index alone: a boundary that moved and
    is still in order divides other documents, as somebody may have wanted, and trains the same.
    """
    magic, version, code, sequences, documents = struct.unpack_from("<9sQBQQ", index)
    if magic != b"MMIDIDX\x00\x00" or version != 1 or code not in CODES.values():
        return None
    dtype = np.dtype(next(name for name, known in CODES.items() if known == code))
    at = struct.calcsize("<9sQBQQ")
    try:
        lengths = np.frombuffer(index, np.int32, sequences, at)
        pointers = np.frombuffer(index, np.int64, sequences, at + 4 * sequences)
        np.frombuffer(index, np.int64, documents, at + 12 * sequences)
        pairs = zip(lengths.tolist(), pointers.tolist(), strict=True)
        tokens = [np.frombuffer(data, dtype, n, p).tolist() for n, p in pairs]
    except (ValueError, OverflowError):
        return None
    return tokens, lengths.tolist()


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@example(lengths=[0, 1], dtype="uint8", place=34 + 24 + 8, change=1, modes=False)
@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any),
    dtype=st.sampled_from(list(CODES)),
    place=st.integers(0, 10**6),
    change=st.one_of(st.integers(1, 255), st.sampled_from([1, 128])),
    modes=st.booleans(),
)
def test_one_damaged_byte_is_found_or_harmless(
    tmp_path: Path, lengths: list[int], dtype: str, place: int, change: int, modes: bool
) -> None:
    """The ids are the highest of their type: a type that reads them otherwise must not pass."""
    count = sum(lengths)
    ids = np.full(count, np.iinfo(dtype).max)
    prefix = write(tmp_path / "data", ids, lengths, dtype=dtype, modes=[0] * len(lengths) * modes)
    index, data = with_suffix(prefix, ".idx"), with_suffix(prefix, ".bin").read_bytes()
    before = index.read_bytes()
    damaged = bytearray(before)
    damaged[place % len(before)] ^= change
    checked(prefix)
    index.write_bytes(damaged)
    try:
        found = checked(prefix)
        corpus.check_ids(found, int(np.iinfo(dtype).max) + 1)
    except CppmegaError as error:
        assert error.name in ("data-broken", "token-out-of-vocabulary"), error.render()
    else:
        assert trained_on(bytes(damaged), data) == trained_on(before, data)


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any), cut=st.data())
def test_a_file_that_is_cut_off_is_found(
    tmp_path: Path, lengths: list[int], cut: st.DataObject
) -> None:
    prefix = write(tmp_path / "data", range(sum(lengths)), lengths)
    path = with_suffix(prefix, cut.draw(st.sampled_from([".idx", ".bin"])))
    whole = path.read_bytes()
    path.write_bytes(whole[: cut.draw(st.integers(0, len(whole) - 1))])
    said(prefix)


def test_without_numpy_it_says_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an environment of its own, cppmega has no numpy."""
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(CppmegaError) as error:
        corpus.open_(Path(__file__).parent / "made_before" / "small")
    assert error.value.name == "package-missing" and sys.executable in error.value.what
