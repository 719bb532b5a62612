"""Records of data that releases without types wrote: the card and the progress at 430962d.

The record of a reading is of the commit that introduced it, and of the same form.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from cppmega.data import corpus, prepare
from cppmega.data import record as data_record
from cppmega.data.tokenizers import ByteTokenizer
from cppmega.errors import CppmegaError

MADE = Path(__file__).parent / "made_before"


@pytest.fixture(name="folder")
def folder_with_its_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = Path(shutil.copytree(MADE, tmp_path / "data"))
    reading = json.loads((folder / "small.checked.json").read_text())
    for suffix, part in ((".bin", "data"), (".idx", "index")):
        os.utime(folder / f"small{suffix}", ns=(reading[part]["changed"],) * 2)
    progress = json.loads((folder / "half.parts" / "state.json").read_text())
    for name, _, changed in progress["settings"]["inputs"]:
        os.utime(folder / name, ns=(changed, changed))
    monkeypatch.chdir(folder)
    return folder


def test_the_card_and_the_reading_are_still_valid(folder: Path) -> None:
    found = corpus.open_(folder / "small")
    assert found.card is not None
    assert (found.card.fingerprint, found.card.documents) == ("769ae9b9910a26e7", 4)
    assert found.card.tokenizer == ByteTokenizer().describe()
    assert found.card.dump() == (folder / "small.json").read_text()
    reading = data_record.kept(found)
    assert reading is not None and (reading.lowest, reading.highest) == (10, 256)


def test_a_reading_is_written_as_before(folder: Path) -> None:
    found = corpus.open_(folder / "small")
    reading, file = data_record.kept(found), folder / "small.checked.json"
    before = json.loads(file.read_text())
    assert reading is not None
    file.unlink()
    data_record.keep(found.prefix, reading)
    assert json.loads(file.read_text()) == before


@pytest.mark.slow
@pytest.mark.megatron
@pytest.mark.filterwarnings("ignore")  # of torch, which the builder imports
def test_a_preparation_is_resumed(folder: Path) -> None:
    card = prepare.prepare(Path("half"), [Path("texts")], ByteTokenizer(), shard_tokens=1)
    assert card.fingerprint == "769ae9b9910a26e7"  # as if it had never been stopped


@pytest.mark.parametrize("text", ["", "{", "[]", '{"settings": 1}', '{"shards": []}'])
def test_a_progress_that_is_torn_or_foreign(folder: Path, text: str) -> None:
    (folder / "half.parts" / "state.json").write_text(text)
    with pytest.raises(CppmegaError, match="preparation-damaged"):
        prepare.prepare(Path("half"), [Path("texts")], ByteTokenizer())
