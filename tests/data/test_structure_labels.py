"""Kind and depth of tokens, by hand for each grammar, and at every border that a tokenizer cuts."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cppmega.data import structure_labels as labels
from cppmega.data import tokenizers
from cppmega.data.structure import LEVELS, NODE_TYPES, Kind, language_of
from cppmega.errors import CppmegaError
from tests.support.tokenizers import byte_level, codes_of, saved

BYTES = tokenizers.ByteTokenizer()

PYTHON = """import os


@cached
def f(a, b=1):
    "doc"
    # note
    x = g(a, "ü")[0] + 2
    return [y for y in x if y]


class Größe:
    pass
"""
C = """#include <stdio.h>
struct point { int x; };

int twice(int n) {
  if (n > 3) { puts("more"); } /* rare */
  return 2 * n;
}
"""
CPP = """namespace n {
template <class T> T make(T v) {
  for (auto& e : v) { e = new T(7); }
  return [](T w) { return w; }(v);
}
using Word = int;
}
"""


def ids(text: str, language: Any, tokenizer: Any = BYTES) -> list[tuple[str, Kind, int]]:
    """Every token of a document: its text, its kind and its depth."""
    document = text.encode()
    codes, _ = labels.of_bytes(document, language)
    (placed,) = tokenizer.encode_placed([document])
    found = labels.of_tokens(document, codes, placed.begins, placed.ends)
    assert placed.ids == tokenizer.encode([document])[0] and len(found) == len(placed.ids)
    pieces = zip(placed.begins, placed.ends, found.tolist(), strict=True)
    return [
        (document[a:b].decode(errors="replace"), Kind(code // LEVELS), code % LEVELS)
        for a, b, code in pieces
    ]


def at(text: str, language: Any, words: str) -> tuple[Kind, int]:
    """Kind and depth of the first byte of some words of a document."""
    place = text.encode().index(words.encode())
    _, kind, depth = ids(text, language)[place]
    return kind, depth


@pytest.mark.parametrize(
    ("language", "text", "words", "kind", "depth"),
    [
        ("python", PYTHON, "import", Kind.DIRECTIVE, 1),
        ("python", PYTHON, "os", Kind.DIRECTIVE, 3),  # dotted name, identifier
        ("python", PYTHON, "\n@", Kind.NONE, 0),
        ("python", PYTHON, "@cached", Kind.FUNCTION, 2),
        ("python", PYTHON, "def f", Kind.FUNCTION, 2),  # in the decorated definition
        ("python", PYTHON, "b=1", Kind.FUNCTION, 5),  # parameters, default parameter, identifier
        ("python", PYTHON, "1):", Kind.LITERAL, 5),
        ("python", PYTHON, '"doc', Kind.LITERAL, 6),  # block, statement, string, its quote
        ("python", PYTHON, "# note", Kind.COMMENT, 4),
        ("python", PYTHON, "x = g", Kind.STATEMENT, 6),
        ("python", PYTHON, "g(a", Kind.CALL, 9),  # assignment, sum, subscript, call, identifier
        ("python", PYTHON, "return", Kind.CONTROL, 4),
        ("python", PYTHON, "for y", Kind.CONTROL, 6),
        ("python", PYTHON, "class", Kind.TYPE, 1),
        ("python", PYTHON, "Größe", Kind.TYPE, 2),
        ("python", PYTHON, "pass", Kind.STATEMENT, 3),
        ("c", C, "#include", Kind.DIRECTIVE, 1),
        ("c", C, "<stdio", Kind.LITERAL, 2),
        ("c", C, "struct", Kind.TYPE, 1),
        ("c", C, "x;", Kind.STATEMENT, 4),  # field list, field, its name
        ("c", C, "\nint twice", Kind.NONE, 0),
        ("c", C, "int twice", Kind.FUNCTION, 2),
        ("c", C, "n) {", Kind.FUNCTION, 5),
        ("c", C, "if", Kind.CONTROL, 3),
        ("c", C, "3)", Kind.LITERAL, 6),
        ("c", C, "puts", Kind.CALL, 7),
        ("c", C, '"more', Kind.LITERAL, 8),
        ("c", C, "/* rare", Kind.COMMENT, 3),
        ("c", C, "return", Kind.CONTROL, 3),
        ("cpp", CPP, "namespace", Kind.TYPE, 1),
        ("cpp", CPP, "template", Kind.TYPE, 3),
        ("cpp", CPP, "make", Kind.FUNCTION, 6),
        ("cpp", CPP, "for (", Kind.CONTROL, 6),
        ("cpp", CPP, "e = new", Kind.STATEMENT, 10),
        ("cpp", CPP, "new", Kind.CALL, 10),
        ("cpp", CPP, "7", Kind.LITERAL, 12),
        ("cpp", CPP, "[](", Kind.FUNCTION, 9),
        ("cpp", CPP, "using", Kind.TYPE, 3),
    ],
)
def test_known_text(language: Any, text: str, words: str, kind: Kind, depth: int) -> None:
    assert at(text, language, words) == (kind, depth)


def test_depth_is_capped() -> None:
    text = "x = " + "(" * 40 + "1" + ")" * 40 + "\n"
    depths = [depth for _, _, depth in ids(text, "python")]
    assert depths[4:8] == [3, 4, 5, 6] and set(depths[16:70]) == {LEVELS - 1}
    assert depths[-2] == 3


@pytest.mark.parametrize("language", ["c", "cpp", "python"])
@pytest.mark.parametrize(
    "document",
    [
        b"It is a text about cats, and the (many) things they do; see https://x.y/z? Not code.\n",
        b"}}} ((( not code at all\n",
        b"def f(:\n   )))\nint main( { return 0 }\n",
        b"\x00\x01\xff\xfe\x80" * 20,
        bytes(range(256)) * 3,
    ],
)
def test_text_that_does_not_parse(language: Any, document: bytes) -> None:
    codes, parsed = labels.of_bytes(document, language)
    assert not parsed and len(codes) == len(document) and not codes.any()


def test_an_error_is_nothing_and_its_neighbours_are_not() -> None:
    text = PYTHON.replace("x = g", "x = = g").encode()
    codes, parsed = labels.of_bytes(text, "python")
    assert parsed
    line = text.index(b"x = = g")
    assert not codes[line + 4] and codes[text.index(b"return")] == Kind.CONTROL * LEVELS + 4


@pytest.mark.parametrize("language", [None, "c", "cpp", "python"])
@pytest.mark.parametrize("document", [b"", b" \n\n"])
def test_empty_documents(language: Any, document: bytes) -> None:
    codes, parsed = labels.of_bytes(document, language)
    assert parsed == (language is not None)
    assert codes.dtype == np.uint8 and codes.tolist() == [0] * len(document)
    nowhere = np.zeros(1, np.int64)
    assert labels.of_tokens(document, codes, nowhere, nowhere).tolist() == [0]


def test_a_language_without_a_grammar() -> None:
    codes, parsed = labels.of_bytes(b"fn main() {}", None)
    assert not parsed and not codes.any()


@given(st.binary(max_size=300), st.sampled_from(("c", "cpp", "python")))
def test_any_bytes_have_one_code_each(document: bytes, language: Any) -> None:
    codes, parsed = labels.of_bytes(document, language)
    assert len(codes) == len(document) and (parsed or not codes.any())
    assert codes.max(initial=0) < len(Kind) * LEVELS


@pytest.mark.parametrize("trim", [False, True])
def test_tokens_of_a_byte_level_bpe(tmp_path: Path, trim: bool) -> None:
    """Cut inside identifiers and characters, with and without the blank before a word."""
    text = 'def größenordnung(x):\n    return rufe(x, "日本語")  # ende\n'
    small = saved(tmp_path, byte_level([PYTHON, text[:20]], 300, trim=trim))
    loaded = tokenizers.load(str(small))
    found, of_byte = ids(text, "python", loaded), ids(text, "python")
    of_the_package = [kind * LEVELS + depth for _, kind, depth in found]
    (own,) = loaded.encode([text.encode()])
    assert len(own) < len(of_byte)
    assert codes_of(text.encode(), "python", loaded, own) == of_the_package
    name = found[1 : [one[0] for one in found].index("(")]
    assert len(name) > 2 and {one[1:] for one in name} == {(Kind.FUNCTION, 2)}
    japanese = [one for one in found if one[0] in ("日", "本", "語", "日本", "本語")]
    assert len(japanese) > 3 and {one[1:] for one in japanese} == {(Kind.LITERAL, 7)}


def test_a_token_stands_at_its_first_character_that_is_not_blank() -> None:
    document = b"x = 1\n\n# c\n"
    codes, _ = labels.of_bytes(document, "python")
    begins, ends = np.array([0, 5, 5, 3]), np.array([1, 8, 7, 3])
    found = labels.of_tokens(document, codes, begins, ends) // LEVELS
    assert found.tolist() == [Kind.STATEMENT, Kind.COMMENT, Kind.NONE, Kind.STATEMENT]


@pytest.mark.parametrize(
    ("name", "language"),
    [
        ("main.c", "c"),
        ("a/b.c++/x.H", "cpp"),
        (".py", "python"),
        ("PYI", "python"),
        ("C++", "cpp"),
        ("C", "c"),
        ("Python", "python"),
        ("rust", None),
        ("x.txt", None),
        ("", None),
    ],
)
def test_languages_by_name(name: str, language: str | None) -> None:
    assert language_of(name) == language


def test_a_grammar_that_is_missing_or_another(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(labels.grammars()) == {"tree-sitter", *(f"tree-sitter-{one}" for one in NODE_TYPES)}
    labels._kinds.cache_clear()
    with monkeypatch.context() as patched:
        patched.setitem(NODE_TYPES["c"], "while_loop", Kind.CONTROL)
        with pytest.raises(CppmegaError, match=r"grammar-differs.*while_loop"):
            labels.grammars()
    labels._grammar.cache_clear()

    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name=name)

    with monkeypatch.context() as patched:
        patched.setattr(importlib, "import_module", missing)
        with pytest.raises(CppmegaError, match=r"package-missing.*tree_sitter_c "):
            labels.grammars()
