"""A dataset is read whole once; afterwards a few blocks of it say whether it is still the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from cppmega import check_data
from cppmega.data import corpus
from cppmega.data import reading as data_reading
from cppmega.data import record as data_record
from cppmega.data.corpus import Corpus, with_suffix
from cppmega.data.reading import Allowance, TooLong
from cppmega.errors import CppmegaError
from cppmega.host import progress
from tests.support import REPOSITORY
from tests.support.datasets import write

BLOCK = 1 << 15
"""Tokens of two bytes in a block of 64 KiB."""


def dataset(prefix: Path, ids: Any, **more: Any) -> Corpus:
    """A dataset of one sequence."""
    return corpus.open_(write(prefix, ids, [len(ids)], **more))


def refused(name: str, found: Corpus, vocab_size: int = 65_536) -> CppmegaError:
    """The named error that reading the whole gives."""
    with pytest.raises(CppmegaError) as caught:
        data_reading.check(found, data_reading.read(found), vocab_size)
    assert caught.value.name == name, caught.value.render()
    return caught.value


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of this goes into the user's cache."""
    monkeypatch.setenv("CPPMEGA_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever reads a dataset whole fails."""

    def never(found: Corpus) -> Any:
        raise AssertionError("it was read again")

    monkeypatch.setattr(data_reading, "_chunks", never)


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64"])
@pytest.mark.parametrize("where", [0, 5 * BLOCK + 3, 9 * BLOCK - 1, 9 * BLOCK + 20])
def test_an_id_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, where: int
) -> None:
    """Also where the look at both ends never comes."""
    monkeypatch.setattr(data_reading, "_CHUNK", 1 << 18)
    monkeypatch.setattr(corpus, "_LOOK", 10)
    ids = np.full(9 * BLOCK + 21, 7)
    ids[where] = 300
    said = refused("token-out-of-vocabulary", dataset(tmp_path / "data", ids, dtype=dtype), 257)
    assert f"holds token 300 at position {where};" in said.what
    if dtype != "uint16":
        ids[where] = -5
        found = dataset(tmp_path / "data", ids, dtype=dtype)
        assert f"token -5 at position {where}" in refused("token-out-of-vocabulary", found).what


def test_it_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = dataset(tmp_path / "data", np.arange(3 * BLOCK) % 257)
    first = Allowance(60, print).read(found)
    monkeypatch.setattr(data_reading, "_chunks", None)
    assert Allowance(60, print).read(found) == first == data_record.kept(found)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_changed_file_is_read_again(tmp_path: Path, suffix: str) -> None:
    found = dataset(tmp_path / "data", np.arange(3 * BLOCK) % 257)
    data_reading.read(found)
    path = with_suffix(found.prefix, suffix)
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert data_record.kept(found) is None


@pytest.mark.parametrize("place", [0, 500_000, 2**21 - 1])
def test_other_bytes_of_the_same_size_and_time(tmp_path: Path, place: int) -> None:
    """Up to 2 MiB every byte is in the sample."""
    found = dataset(tmp_path / "data", np.arange(2**20) % 257)
    data_reading.read(found)
    stat, data = found.data_file.stat(), bytearray(found.data_file.read_bytes())
    data[place] ^= 1
    found.data_file.write_bytes(data)
    os.utime(found.data_file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert found.data_file.stat().st_mtime_ns == stat.st_mtime_ns
    assert data_record.kept(found) is None


def test_the_sample_finds_a_stretch_of_a_31st(tmp_path: Path) -> None:
    path, size = tmp_path / "file", 31 * 3 * 2**16
    path.write_bytes(b"\0" * size)
    before, stretch = data_record.sample(path), size // 31 + 1
    for place in range(0, size - stretch, size // 50):
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"\1" * stretch)
        assert data_record.sample(path) != before, place
        path.write_bytes(b"\0" * size)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: "[]",
        lambda text: text[:-20],
        lambda text: text.replace('"highest": 256', '"highest": 255'),
        lambda text: text.replace('"schema": 1', '"schema": 2'),
        lambda text: text.replace('"zeros": 0', '"zeros": "0"'),
    ],
)
def test_a_damaged_record_does_not_count(tmp_path: Path, damage: Any) -> None:
    found = dataset(tmp_path / "data", np.arange(1000) % 257)
    data_reading.read(found)
    record = with_suffix(found.prefix, ".checked.json")
    damaged = damage(record.read_text())
    assert damaged != record.read_text()
    record.write_text(damaged)
    assert data_record.kept(found) is None
    Allowance(None, print).read(found)
    assert data_record.kept(found) is not None


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_reading: None
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("CPPMEGA_CACHE", str(tmp_path / "cache"))
    found = dataset(tmp_path / "data", np.arange(1000) % 257)
    with_suffix(found.prefix, ".checked.json").mkdir()  # root may write everywhere else
    reading = data_reading.read(found)
    assert list((tmp_path / "cache" / "data").glob("*.json"))
    assert data_record.kept(found) == reading
    assert not list(tmp_path.glob("*.new"))


def test_what_takes_too_long_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_reading, "_LEARN", 0.0)
    monkeypatch.setattr(data_reading, "_CHUNK", 1 << 16)
    found = dataset(tmp_path / "data", np.arange(40 * BLOCK) % 257)
    with pytest.raises(TooLong) as caught:
        data_reading.read(found, seconds=1e-6)
    assert caught.value.seconds > 1e-6 and caught.value.speed > 0
    allowance = Allowance(1e-6, print)
    assert allowance.read(found) is None
    assert list(allowance.left_out) == [found.prefix]
    assert data_record.kept(found) is None
    assert Allowance(None, print).read(found) is not None


def test_a_long_reading_says_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_EVERY", 0.0)
    monkeypatch.setattr(data_reading, "_CHUNK", 1 << 16)
    found, said = dataset(tmp_path / "data", np.arange(9 * BLOCK) % 257), list[str]()
    Allowance(None, said.append).read(found)
    assert len(said) >= 9 and f"reading {found.prefix}: 0.0 of 0.0 GB" in said[-1]


def test_blocks_of_zeros(tmp_path: Path) -> None:
    """A sparse file, as a download leaves it that reserved its place and ended."""
    ids = np.full(20 * BLOCK, 7)
    ids[3 * BLOCK : 5 * BLOCK] = 0
    found = dataset(tmp_path / "data", ids)
    assert "2 blocks" in refused("data-broken", found).what
    with found.data_file.open("r+b") as file:
        file.truncate(4 * 2**16)
        file.truncate(40 * 2**15)  # the rest is one hole
    assert "17 blocks" in refused("data-broken", found).what
    command = [str(found.prefix), "--zeros-are-data"]
    assert CliRunner().invoke(check_data.main, command).exit_code == 0
    reading = data_record.kept(found)
    assert reading is not None
    data_reading.check(found, reading, 257)


@pytest.mark.parametrize(
    "write_more",
    [
        lambda file: file.truncate(2**17),
        lambda file: file.seek(0, os.SEEK_END) and file.write(b"\0"),
        lambda file: file.write(b"\7\0"),
    ],
    ids=["shorter", "longer", "other"],
)
def test_a_dataset_that_is_written_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_more: Any
) -> None:
    monkeypatch.setattr(data_reading, "_CHUNK", 1 << 16)
    found = dataset(tmp_path / "data", np.arange(9 * BLOCK) % 257)
    time.sleep(0.02)  # some file systems tell times in steps

    def change(count: int) -> None:
        with found.data_file.open("r+b") as file:
            write_more(file)

    with pytest.raises(CppmegaError, match="data-being-written"):
        data_reading.read(found, advance=change)
    assert data_record.kept(found) is None


def test_a_disk_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = dataset(tmp_path / "data", np.arange(9 * BLOCK) % 257)
    real = np.fromfile

    def failing(file: Any, *args: Any, **more: Any) -> Any:
        if more.get("count") == found.data_file.stat().st_size:
            raise OSError(5, "Input/output error")
        return real(file, *args, **more)

    monkeypatch.setattr(np, "fromfile", failing)
    with pytest.raises(CppmegaError, match=r"data-not-readable.*Input/output error"):
        data_reading.read(found)


def test_two_readings_at_once_keep_one_record(tmp_path: Path) -> None:
    found = dataset(tmp_path / "data", np.arange(40 * BLOCK) % 257)
    threads = [threading.Thread(target=data_reading.read, args=(found,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.001)
        record = with_suffix(found.prefix, ".checked.json")
        assert not record.exists() or json.loads(record.read_text())["highest"] == 256
    assert data_record.kept(found) is not None


def test_a_link_to_other_data(tmp_path: Path) -> None:
    one = dataset(tmp_path / "one", np.arange(1000) % 257)
    other = dataset(tmp_path / "other", np.arange(1000) % 250)
    for suffix in (".bin", ".idx"):
        with_suffix(tmp_path / "link", suffix).symlink_to(with_suffix(one.prefix, suffix))
    linked = corpus.open_(tmp_path / "link")
    data_reading.read(linked)
    assert data_record.kept(linked) is not None
    with_suffix(tmp_path / "link", ".bin").unlink()
    with_suffix(tmp_path / "link", ".bin").symlink_to(other.data_file)
    os.utime(other.data_file, ns=(0, one.data_file.stat().st_mtime_ns))
    assert data_record.kept(linked) is None


def test_a_name_for_data_without_a_card(tmp_path: Path) -> None:
    """Not the number of tokens: Megatron's cached sample index of other data has as many."""
    one = dataset(tmp_path / "one", np.arange(1000) % 257)
    same = dataset(tmp_path / "same", np.arange(1000) % 257)
    other = corpus.open_(write(tmp_path / "other", np.arange(1000) % 257, [400, 600]))
    assert data_record.name(one) == data_record.name(same) != data_record.name(other)


def test_the_command(tmp_path: Path) -> None:
    """As a user types it: progress on stderr, one line on stdout, exit status 1."""
    good = dataset(tmp_path / "good", np.arange(5000) % 257)
    script = str(REPOSITORY / "scripts" / "check_data.py")
    command = [sys.executable, script, str(good.prefix), "--tokenizer", "byte"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert "5000 tokens, ids 0 to 256" in done.stdout
    assert "reading good" in done.stderr
    assert data_record.kept(good) is not None
    invoked = CliRunner().invoke(check_data.main, [str(good.prefix), "--vocab-size", "256"])
    assert invoked.exit_code == 1 and "token-out-of-vocabulary" in invoked.output
    invoked = CliRunner().invoke(check_data.main, [str(tmp_path / "gone")])
    assert invoked.exit_code == 1 and "data-not-found" in invoked.output
    invoked = CliRunner().invoke(check_data.main, [str(good.prefix), "--vocab-size", "100000"])
    assert invoked.exit_code == 1 and "data-type-too-narrow" in invoked.output
    assert "PREFIXES" in CliRunner().invoke(check_data.main, ["--help"]).output
