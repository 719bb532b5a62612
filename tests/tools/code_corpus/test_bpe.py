"""The trained tokenizer: the same each time, without loss, and with places that fit the text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cppmega.data import structure_labels, tokenizers
from cppmega.errors import CppmegaError
from tests.support.tokenizers import codes_of
from tests.tools.code_corpus.projects import c, python
from tools.code_corpus import bpe

SIZE = 380
TEXTS = [maker(name) for name in ("one", "two", "three") for maker in (python, c)]


@pytest.fixture(scope="module", name="trained")
def a_trained_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "tokenizer"
    bpe.train(TEXTS, SIZE, folder)
    return folder


def test_its_vocabulary_is_full_and_ends_documents(trained: Path) -> None:
    tokenizer = tokenizers.load(str(trained))
    assert (tokenizer.vocab_size, tokenizer.eod) == (SIZE, 0)
    every = tokenizer.encode([bytes(range(128)), "¡ÿĀ߿ࠀ￿𐀀\U0010ffff".encode()])
    assert all(0 < one < SIZE for ids in every for one in ids)


def test_the_same_texts_give_the_same_file(trained: Path, tmp_path: Path) -> None:
    bpe.train(iter(TEXTS), SIZE, tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (trained / name).read_bytes()
    bpe.train(TEXTS[1:], SIZE, tmp_path / "other")
    other = (tmp_path / "other" / "tokenizer.json").read_bytes()
    assert other != (trained / "tokenizer.json").read_bytes()


@given(st.text())
@example("\r\n\n\t  x  \n y = 10000 \n")
@example("größer →  😀\u2028\x85")
@example("#define A_1(x)\\\n    ((x)->b__1 <<= 0x7fUL)  \n")
def test_every_text_comes_back_and_every_token_is_where_it_says(trained: Path, text: str) -> None:
    tokenizer = tokenizers.HuggingFaceTokenizer(trained)
    document = text.encode()
    (placed,) = tokenizer.encode_placed([document])
    assert tokenizer._tokenizer.decode(placed.ids) == text
    assert placed.ids == tokenizer.encode([document])[0]
    found = structure_labels.of_tokens(
        document, structure_labels.of_bytes(document, "c")[0], placed.begins, placed.ends
    )
    assert list(found) == codes_of(document, "c", tokenizer, placed.ids)


def test_names_stay_together_and_numbers_are_cut(trained: Path) -> None:
    tokenizer = tokenizers.HuggingFaceTokenizer(trained)
    vocabulary = json.loads((trained / "tokenizer.json").read_text())["model"]["vocab"]
    assert any("_" in token and len(token) > 4 for token in vocabulary)
    assert "ĊĠĠĠĠ" in vocabulary  # the end of a line and the next one's indent
    (placed,) = tokenizer.encode_placed([b"x=1234567\n"])
    assert {2, 5, 8} <= set(np.append(placed.begins, 9).tolist())


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CppmegaError, match="not 4096") as caught:
        bpe.train(TEXTS[:1], 4096, tmp_path)
    assert caught.value.name == "vocabulary-not-filled" and not list(tmp_path.iterdir())
