"""Structure ids beside the tokens: right after shards, kills and joins, and refused when not."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from cppmega import check_data
from cppmega.data import command, corpus, structure_files, structure_labels, tokenizers
from cppmega.data import prepare as data
from cppmega.data import reading as data_reading
from cppmega.data import record as data_record
from cppmega.data.corpus import Card, with_suffix
from cppmega.data.sources import files
from cppmega.data.structure import COLUMN, LEVELS, Kind, language_of
from cppmega.errors import CppmegaError
from tests.data.killed import killed_at_each_rename
from tests.data.test_structure_labels import CPP, PYTHON, C
from tests.support.tokenizers import byte_level, codes_of, saved

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("no_collections"),
]
BYTES = tokenizers.ByteTokenizer()
TEXTS = {
    "a/one.py": PYTHON,
    "a/two.c": C,
    "a/three.cc": CPP,
    "b/four.py": PYTHON * 3,
    "b/five.txt": "def f(): it is no code, and says ü.\n",
    "b/six.py": "}}} ((( never a program\n" * 3,
    "b/seven.h": C[C.index("struct") :],
    "b/empty.py": " \n",
}
COUNTS = {"python": 2, "c": 1, "cpp": 2, "no grammar": 1, "not parsed": 1}


@pytest.fixture(autouse=True)
def quick_and_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small batches, and nothing in the user's cache."""
    monkeypatch.setattr(data, "_BATCH", 3)
    monkeypatch.setenv("CPPMEGA_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module", name="made")
def a_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources, a tokenizer that cuts them everywhere, and the dataset `whole` of both."""
    folder = tmp_path_factory.mktemp("made")
    for name, text in TEXTS.items():
        path = folder / "sources" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "sources" / "b" / "picture.py").write_bytes(b"\0\1")
    (folder / "sources" / "b" / "latin1.py").write_bytes("x = 'ü'\n".encode("latin-1"))
    saved(folder / "tokenizer", byte_level([PYTHON[:60], C[:40]], 280))
    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patched.setattr(data, "_BATCH", 3)
        prepared(folder, folder / "whole")
    return folder


def prepared(made: Path, out: Path, **options: Any) -> Card:
    """Prepare the sources in small shards."""
    tokenizer = tokenizers.load(str(made / "tokenizer"))
    asked = {"shard_tokens": 200, "structure": True, **options}
    return data.prepare(out, [made / "sources"], tokenizer, **asked)


def copied(made: Path, folder: Path) -> Path:
    """A copy of the dataset, to be broken."""
    for path in made.glob("whole.*"):
        shutil.copy2(path, folder)
    return folder / "whole"


def sequences(prefix: Path) -> list[np.ndarray[Any, Any]]:
    """The documents as Megatron reads them."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    return [np.array(one) for one in IndexedDataset(str(prefix))]


def refused(name: str, prefix: Path) -> CppmegaError:
    """The named error of reading a dataset with its structure ids."""
    with pytest.raises(CppmegaError) as caught:
        structure_files.check(corpus.open_(prefix), data_reading.read)
    assert caught.value.name == name, caught.value.render()
    return caught.value


def test_every_token_has_the_ids_of_its_text(made: Path) -> None:
    tokens, codes = sequences(made / "whole"), sequences(made / f"whole{COLUMN}")
    left_out = ("empty.py", "picture.py", "latin1.py")
    paths = [path for path in files([made / "sources"], ()) if path.name not in left_out]
    tokenizer = tokenizers.load(str(made / "tokenizer"))
    assert len(paths) == len(tokens) == len(codes) == 7
    for path, ids, own in zip(paths, tokens, codes, strict=True):
        expected = codes_of(path.read_bytes(), language_of(path.suffix), tokenizer, ids[:-1])
        assert own.tolist() == [*expected, 0], path
        assert any(expected) == (path.name not in ("five.txt", "six.py"))
    assert {int(code) // LEVELS for own in codes for code in own} == set(map(int, Kind))


def test_the_card_says_what_they_are(made: Path) -> None:
    found = corpus.open_(made / "whole")
    assert found.card is not None and found.card.structure is not None
    record = found.card.structure
    assert record.documents == COUNTS
    assert found.card.skipped == {"empty": 1, "binary": 1, "not UTF-8": 1}
    assert record.grammars == structure_labels.grammars()
    assert record.tokenizer == found.card.tokenizer.digest != BYTES.describe().digest
    assert (record.bin_sha256, record.idx_sha256) == corpus.digest(made / f"whole{COLUMN}")
    structure_files.check(found, data_record.kept)
    structure_files.check(found, data_reading.read)


def test_the_tokens_are_those_of_a_preparation_without(tmp_path: Path, made: Path) -> None:
    without = prepared(made, tmp_path / "without", structure=False)
    whole = corpus.read_card(made / "whole")
    assert whole is not None and without.structure is None
    assert (without.bin_sha256, without.idx_sha256) == (whole.bin_sha256, whole.idx_sha256)
    assert without.fingerprint != whole.fingerprint
    assert not list(tmp_path.glob(f"*{COLUMN}*"))


def test_a_run_killed_at_any_rename_goes_on_and_ends_the_same(
    tmp_path: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(point: int) -> Card:
        return prepared(made, tmp_path / f"killed{point}", shard_tokens=600)

    def check(point: int) -> None:
        assert run(point).dump() == (made / "whole.json").read_text()
        for ending in (".bin", ".idx", f"{COLUMN}.bin", f"{COLUMN}.idx"):
            out = tmp_path / f"killed{point}"
            one, other = with_suffix(out, ending), with_suffix(made / "whole", ending)
            assert one.read_bytes() == other.read_bytes(), (point, ending)

    assert killed_at_each_rename(monkeypatch, run, check) > 12


def test_it_is_resumed_only_with_the_same_structure(
    tmp_path: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(took: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepared(made, tmp_path / "out", advance=die)
    with pytest.raises(CppmegaError, match="inputs-changed"):
        prepared(made, tmp_path / "out", structure=False)
    grammars = structure_labels.grammars() | {"tree-sitter-c": "0.1"}
    monkeypatch.setattr(structure_labels, "grammars", lambda: grammars)
    with pytest.raises(CppmegaError, match="inputs-changed"):
        prepared(made, tmp_path / "out")
    (tmp_path / f"new{COLUMN}.idx").touch()  # of a dataset that was removed in part
    with pytest.raises(CppmegaError, match="data-exists"):
        prepared(made, tmp_path / "new", structure=False)


def test_lines_name_their_language(tmp_path: Path) -> None:
    lines = [
        {"text": "x = 1\n", "lang": "Python"},
        {"text": "x = 1;\n", "lang": "src/x.c"},
        {"text": "x = 1\n", "lang": "Haskell"},
        {"text": "x = 1\n", "lang": ""},
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "out"
    card = data.prepare(out, [source], BYTES, structure=True, language_key="lang")
    assert card.structure is not None
    assert card.structure.documents == {"python": 1, "c": 1, "no grammar": 2}
    found = [own[0] // LEVELS for own in sequences(with_suffix(out, COLUMN))]
    assert found == [Kind.STATEMENT, Kind.STATEMENT, Kind.NONE, Kind.NONE]
    with pytest.raises(CppmegaError, match="language-unknown"):
        data.prepare(tmp_path / "other", [source], BYTES, structure=True)
    lines[2]["lang"] = 7  # type: ignore[assignment]
    source.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(CppmegaError, match=r"line 3: TypeError lang is not a text"):
        data.prepare(tmp_path / "other", [source], BYTES, structure=True, language_key="lang")


def test_through_the_commands(tmp_path: Path, made: Path) -> None:
    words = [str(made / "sources"), "--out", str(tmp_path / "own"), "--suffix", ".py"]
    done = CliRunner().invoke(command.main, [*words, "--structure"])
    said = "structure ids of definition 1 (not parsed 1, python 3)"
    assert done.exit_code == 0 and said in done.output, done.output
    done = CliRunner().invoke(check_data.main, [str(tmp_path / "own")])
    assert done.exit_code == 0 and said in done.output, done.output
    assert (tmp_path / f"own{COLUMN}.checked.json").is_file()
    assert CliRunner().invoke(command.main, [*words, "--language-key", "a"]).exit_code == 2


def test_ids_of_other_tokens_are_refused(tmp_path: Path, made: Path) -> None:
    prefix = copied(made, tmp_path)
    codes = with_suffix(prefix, f"{COLUMN}.bin")
    structure_files.check(corpus.open_(prefix), data_reading.read)
    shifted = np.roll(np.fromfile(codes, np.uint8), 1)
    shifted.tofile(codes)
    assert COLUMN in refused("data-changed", prefix).what
    done = CliRunner().invoke(check_data.main, [str(prefix)])
    assert done.exit_code == 1 and "data-changed" in done.output

    byte_wise = tmp_path / "bytes"
    data.prepare(byte_wise, [made / "sources"], BYTES, structure=True, suffixes=[".py"])
    for suffix in (".bin", ".idx"):
        shutil.copy2(with_suffix(byte_wise, COLUMN + suffix), with_suffix(prefix, COLUMN + suffix))
    assert "does not match the tokens" in refused("data-broken", prefix).what


def test_lengths_are_compared_where_the_rest_is_not_read(tmp_path: Path, made: Path) -> None:
    """An index of the same numbers of tokens and documents, with a border moved by one."""
    prefix = copied(made, tmp_path)
    index = with_suffix(prefix, f"{COLUMN}.idx")
    raw = bytearray(index.read_bytes())
    lengths = np.frombuffer(raw, "<i4", count=2, offset=34)
    first_pointer = 34 + 4 * 7
    np.frombuffer(raw, "<i8", count=2, offset=first_pointer)[1] += 1
    lengths += np.array([1, -1], "<i4")
    index.write_bytes(raw)
    with pytest.raises(CppmegaError, match="other lengths"):
        structure_files.check(corpus.open_(prefix), lambda codes: None)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"definition": 2}, "structure-differs"),
        ({"tokenizer": BYTES.describe().digest}, "data-broken"),
        ({"bin_sha256": "0" * 64}, "data-broken"),  # the fingerprint is another
        (None, "data-broken"),
    ],
)
def test_a_card_that_was_changed(
    tmp_path: Path, made: Path, change: dict[str, Any] | None, name: str
) -> None:
    prefix = copied(made, tmp_path)
    card = json.loads((tmp_path / "whole.json").read_text())
    card["structure"] = card["structure"] | change if change is not None else None
    (tmp_path / "whole.json").write_text(json.dumps(card))
    refused(name, prefix)


def test_files_that_are_missing(tmp_path: Path, made: Path) -> None:
    prefix = copied(made, tmp_path)
    with_suffix(prefix, f"{COLUMN}.idx").unlink()
    assert f"whole{COLUMN}.idx" in refused("structure-missing", prefix).what
    plain = tmp_path / "plain"
    prepared(made, plain, structure=False)
    assert "without --structure" in refused("structure-missing", plain).what
    with_suffix(plain, ".json").unlink()
    assert "no card" in refused("structure-missing", plain).what
    with pytest.raises(CppmegaError, match="that folder holds plain, whole"):
        corpus.open_(tmp_path / "gone")
