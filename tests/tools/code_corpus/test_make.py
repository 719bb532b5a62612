"""From an archive to datasets: the text comes back, parts stay apart, and kills cost nothing."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from cppmega.data import corpus, structure_labels, tokenizers
from cppmega.data.structure import COLUMN, LEVELS, language_of
from cppmega.errors import CppmegaError
from tests.data.killed import killed_at_each_rename
from tests.tools.code_corpus.projects import all_of_them
from tests.tools.code_corpus.test_archive import DOCUMENTS
from tools.code_corpus import archive as archives
from tools.code_corpus import command, download, make
from tools.code_corpus.card import CodeCard
from tools.code_corpus.listing import Source

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("no_collections"),
]
SIZE = 320


@contextmanager
def silent(title: str, total: int) -> Iterator[Callable[[int], None]]:
    yield lambda took: None


def made(folder: Path, out: Path) -> CodeCard:
    return make.make(folder / "code.tar.xz", out, SIZE, silent)


@pytest.fixture(scope="module", name="folder")
def a_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive, its unpacked files in `text`, and the corpus `whole`."""
    folder = tmp_path_factory.mktemp("corpus")
    files = all_of_them(folder / "index")
    archives.pack(list(files), files, folder / "code.tar.xz")
    archives.extract(folder / "code.tar.xz", folder / "text")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made(folder, folder / "whole")
    return folder


def documents(prefix: Path) -> list[np.ndarray[Any, Any]]:
    """The documents as Megatron reads them; the dataset's own arrays end with it."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    return [document.copy() for document in IndexedDataset(str(prefix))]


@pytest.mark.parametrize("part", ["train", "heldout"])
def test_the_text_comes_back_with_its_structure(folder: Path, part: str) -> None:
    tokenizer = tokenizers.HuggingFaceTokenizer(folder / "whole" / "tokenizer")
    names = [name for name in DOCUMENTS if name.startswith(part)]
    found = documents(folder / "whole" / part)
    codes = documents(corpus.with_suffix(folder / "whole" / part, COLUMN))
    assert len(found) == len(codes) == len(names) > 0
    for name, ids, own in zip(names, found, codes, strict=True):
        text = (folder / "text" / name).read_bytes()
        assert ids[-1] == tokenizer.eod and tokenizer.eod not in ids[:-1] and own[-1] == 0
        assert tokenizer._tokenizer.decode(ids[:-1].tolist()).encode() == text
        of_bytes, parsed = structure_labels.of_bytes(text, language_of(name))
        assert parsed and len(own) == len(ids)
        (placed,) = tokenizer.encode_placed([text])
        wanted = structure_labels.of_tokens(text, of_bytes, placed.begins, placed.ends)
        assert np.array_equal(own[:-1], wanted) and (own >= LEVELS).mean() > 0.8


def test_the_card_counts_what_is_there(folder: Path) -> None:
    card = json.loads((folder / "whole" / "card.json").read_text())
    for part, count in (("train", 4), ("heldout", 1)):
        found = corpus.open_(folder / "whole" / part)
        record = card["parts"][part]
        assert found.card is not None and record["fingerprint"] == found.card.fingerprint
        assert (record["documents"], record["tokens"]) == (count, found.tokens)
        paths = [folder / "text" / name for name in DOCUMENTS if name.startswith(part)]
        assert record["bytes"] == sum(path.stat().st_size for path in paths)
        ids = np.concatenate(documents(found.prefix))
        codes = np.concatenate(documents(corpus.with_suffix(found.prefix, COLUMN)))
        inner = ids != found.card.tokenizer.eod
        assert sum(record["structure"]["tokens"].values()) == inner.sum()
        assert record["share"] == round(float((codes[inner] >= LEVELS).mean()), 4) > 0.9
        assert found.card.tokenizer.vocab_size == SIZE
        assert card["tokenizer"]["sha256"] == found.card.tokenizer.sha256
    page = (folder / "whole" / "card.md").read_text()
    assert f"{card['parts']['train']['tokens']:,} tokens for training" in page
    assert "| two | 1.0 | MIT | 2 |" in page and "| lines of other files | 1 |" in page
    assert (folder / "whole/licenses/one-lib-1.0/LICENSE").is_file()
    assert not (folder / "whole" / "work").exists()


def test_killed_at_any_rename_it_goes_on_and_ends_the_same(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(point: int) -> CodeCard:
        return made(folder, tmp_path / str(point) / "whole")

    def check(point: int) -> None:
        run(point)
        files = {p.name: p for p in (tmp_path / str(point) / "whole").iterdir() if p.is_file()}
        whole = {p.name: p for p in (folder / "whole").iterdir() if p.is_file()}
        assert files.keys() == whole.keys()
        for name, path in whole.items():
            assert files[name].read_bytes() == path.read_bytes(), (point, name)

    assert killed_at_each_rename(monkeypatch, run, check) > 20


def test_it_never_overwrites_and_never_mixes(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CppmegaError, match="data-exists"):
        made(folder, folder / "whole")

    @contextmanager
    def die(title: str, total: int) -> Iterator[Callable[[int], None]]:
        raise KeyboardInterrupt
        yield lambda took: None

    with pytest.raises(KeyboardInterrupt):
        make.make(folder / "code.tar.xz", tmp_path / "out", SIZE, die)
    with pytest.raises(CppmegaError, match="inputs-changed"):
        make.make(folder / "code.tar.xz", tmp_path / "out", SIZE + 1, silent)
    files = all_of_them(tmp_path / "index")
    archives.pack(list(files)[::2], files, tmp_path / "code.tar.xz")
    with pytest.raises(CppmegaError, match="inputs-changed"):
        made(tmp_path, tmp_path / "out")


def test_through_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {source.name: path for source, path in all_of_them(tmp_path / "index").items()}
    entries = [
        f'[[source]]\nname = "{source.name}"\nversion = "1.0"\nlicense = "MIT"\n'
        f'sha256 = "{source.sha256}"\npart = "{source.part}"\n'
        for source in all_of_them(tmp_path / "index")
    ]
    (tmp_path / "list.toml").write_text("\n".join(entries))

    def fetched(source: Source, say: Callable[[str], None]) -> Path:
        return files[source.name]

    monkeypatch.setattr(download, "fetched", fetched)
    words = ["--archive", str(tmp_path / "code.tar.xz"), "--sources", str(tmp_path / "list.toml")]
    done = CliRunner().invoke(command.main, words)
    assert done.exit_code == 0 and "6 documents of 3 projects" in done.output, done.output
    monkeypatch.delattr(download, "fetched")  # a host without network
    words += ["--out", str(tmp_path / "out"), "--vocab-size", str(SIZE)]
    done = CliRunner().invoke(command.main, words)
    assert done.exit_code == 0 and "5 documents" in done.output, done.output
    assert "of the tokens have a kind" in done.output
    done = CliRunner().invoke(command.main, words)
    assert done.exit_code == 1 and "data-exists" in done.output


def test_a_vocabulary_that_the_text_cannot_fill(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CppmegaError, match="vocabulary-not-filled"):
        make.make(folder / "code.tar.xz", tmp_path / "out", 65536, silent)
