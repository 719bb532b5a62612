"""The documents of a dataset: from text files, JSON lines, and source trees."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cppmega.data.structure import Language, language_of
from cppmega.errors import CppmegaError
from cppmega.host import json_text

_LEFT_OUT = {"__pycache__", "node_modules", "site-packages"}
"""Folders of a source tree that hold no sources; hidden ones are left out as well."""


@dataclass(frozen=True, slots=True)
class Document:
    """One document as read, and how many bytes of input it took."""

    text: bytes
    took: int
    problem: str = ""
    """Why it is left out; empty if it is not."""
    language: Language | None = None
    """Language of the text, if there is a grammar for it."""


def files(inputs: Sequence[Path], suffixes: Sequence[str]) -> list[Path]:
    """List every input file, in an order that does not depend on the file system.

    Raises:
        CppmegaError: `input-not-found`, `no-input`.
    """
    paths: list[Path] = []
    for path in inputs:
        if path.is_dir():
            paths += sorted(_tree(path, suffixes))
        elif path.is_file():
            paths.append(path)
        else:
            raise CppmegaError(
                "input-not-found",
                f"There is no file or folder {path}.",
                "A corpus with a part missing looks like a complete one.",
                "correct the path",
            )
    if not paths:
        raise CppmegaError(
            "no-input",
            f"No files in {', '.join(map(str, inputs))}"
            + (f" end in {', '.join(suffixes)}." if suffixes else "."),
            "The dataset would be empty.",
            "other inputs, or other --suffix",
        )
    return paths


def _tree(folder: Path, suffixes: Sequence[str]) -> Iterator[Path]:
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not left_out(name)]
        for name in names:
            if not left_out(name) and (not suffixes or name.endswith(tuple(suffixes))):
                yield Path(where) / name


def left_out(name: str) -> bool:
    """Whether a file or folder of that name in a source tree is skipped."""
    return name.startswith(".") or name in _LEFT_OUT


def documents(
    paths: Iterable[Path], key: str, language_key: str | None = None
) -> Iterator[Document]:
    """Read one document per file, or per line of a `.jsonl` file.

    Args:
        paths: the files; the suffix of a text file decides its language.
        key: the field of a JSON line that holds the text.
        language_key: the field that names the language, or the file that the text is from; None:
            it is not read.

    Raises:
        CppmegaError: `bad-jsonl`.
    """
    for path in paths:
        if path.suffix == ".jsonl":
            yield from _lines(path, key, language_key)
            continue
        text = path.read_bytes()
        problem = "empty" if not text.strip() else "binary" if b"\0" in text else ""
        yield Document(text, len(text), problem, language_of(path.suffix))


def _lines(path: Path, key: str, language_key: str | None) -> Iterator[Document]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                fields = json_text.loads(line)
                text = _text(fields, key)
                language = language_of(_text(fields, language_key)) if language_key else None
            except (ValueError, KeyError, TypeError) as error:
                wanted = f"{key!r} and {language_key!r}" if language_key else repr(key)
                raise CppmegaError(
                    "bad-jsonl",
                    f"{path}, line {number}: {type(error).__name__} {error}",
                    f"Every line must be a JSON object with a text under {wanted}.",
                    "correct the line, or name the field with --key"
                    + " or --language-key" * bool(language_key),
                ) from error
            yield Document(text.encode(), len(line), "" if text.strip() else "empty", language)


def _text(fields: Any, key: str) -> str:
    text = fields[key]
    if not isinstance(text, str):
        raise TypeError(f"{key} is not a text")
    return text
