"""Turn text, JSONL or source trees into a Megatron dataset: resumable, never overwriting.

Documents are written in shards, each finished with a rename and an entry in
`PREFIX.parts/state.json`; a run that was killed resumes after the last one. The shards are then
joined, and the card with the fingerprint of the result is written last.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from filelock import FileLock, Timeout

from cppmega.data.corpus import Card, Count, digest, with_suffix
from cppmega.data.tokenizers import Tokenizer, TokenizerRecord
from cppmega.errors import CppmegaError
from cppmega.host import durable, interpreter
from cppmega.tree.installed import find_root

SHARD_TOKENS = 1 << 24
"""Tokens after which a shard is finished, and the most that a kill can cost."""
_BATCH = 256
"""Documents encoded together."""
_LEFT_OUT = {"__pycache__", "node_modules", "site-packages"}
"""Folders of a source tree that hold no sources; hidden ones are left out as well."""

Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Document:
    """One document as read, and how many bytes of input it took."""

    text: bytes
    took: int
    problem: str = ""
    """Why it is left out; empty if it is not."""


class Settings(msgspec.Struct, frozen=True):
    """Inputs and tokenizer: a resumed preparation must have the same."""

    tokenizer: TokenizerRecord
    key: str
    inputs: tuple[tuple[str, int, int], ...]
    """Path, size and modification time (ns) of every input file."""


class PrepareProgress(msgspec.Struct):
    """The progress so far."""

    settings: Settings
    shards: list[str] = []
    read: Count = 0
    """Documents read, left-out ones included."""
    documents: Count = 0
    tokens: Count = 0
    skipped: dict[str, int] = {}
    joining: bool = False


def files(inputs: Sequence[Path], suffixes: Sequence[str]) -> list[Path]:
    """List every input file, in an order that does not depend on the file system.

    Raises:
        CppmegaError: `input-not-found`, `no-input`.
    """
    found: list[Path] = []
    for path in inputs:
        if path.is_dir():
            found += sorted(_tree(path, suffixes))
        elif path.is_file():
            found.append(path)
        else:
            raise CppmegaError(
                "input-not-found",
                f"There is no file or folder {path}.",
                "A corpus with a part missing looks like a complete one.",
                "correct the path",
            )
    if not found:
        raise CppmegaError(
            "no-input",
            f"No files in {', '.join(map(str, inputs))}"
            + (f" end in {', '.join(suffixes)}." if suffixes else "."),
            "The dataset would be empty.",
            "other inputs, or other --suffix",
        )
    return found


def _tree(folder: Path, suffixes: Sequence[str]) -> Iterator[Path]:
    for where, folders, names in os.walk(folder):
        folders[:] = [n for n in folders if not n.startswith(".") and n not in _LEFT_OUT]
        for name in names:
            if not name.startswith(".") and (not suffixes or name.endswith(tuple(suffixes))):
                yield Path(where) / name


def documents(paths: Iterable[Path], key: str) -> Iterator[Document]:
    """Read one document per file, or per line of a `.jsonl` file.

    Raises:
        CppmegaError: `bad-jsonl`.
    """
    for path in paths:
        if path.suffix == ".jsonl":
            yield from _lines(path, key)
            continue
        text = path.read_bytes()
        problem = "empty" if not text.strip() else "binary" if b"\0" in text else ""
        yield Document(text, len(text), problem)


def _lines(path: Path, key: str) -> Iterator[Document]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[key]
                if not isinstance(text, str):
                    raise TypeError(f"{key} is not a text")
            except (ValueError, KeyError, TypeError) as error:
                raise CppmegaError(
                    "bad-jsonl",
                    f"{path}, line {number}: {type(error).__name__} {error}",
                    f"Every line must be a JSON object with a text under {key!r}.",
                    "correct the line, or name the field with --key",
                ) from error
            yield Document(text.encode(), len(line), "" if text.strip() else "empty")


def prepare(
    out: Path,
    inputs: Sequence[Path],
    tokenizer: Tokenizer,
    *,
    key: str = "text",
    suffixes: Sequence[str] = (),
    shard_tokens: int = SHARD_TOKENS,
    advance: Advance = lambda took: None,
) -> Card:
    """Build `out.bin`, `out.idx` and `out.json`; resumes an earlier call that was stopped.

    Args:
        out: path without a suffix.
        inputs: text files, `.jsonl` files, folders.
        tokenizer: turns them into tokens.
        key: the field of a JSON line that holds the text.
        suffixes: in folders, only files with these endings; empty: every text file.
        shard_tokens: tokens after which a shard is finished.
        advance: called with the bytes of input read, those of an earlier call included.

    Raises:
        CppmegaError: `data-exists`, `inputs-changed`, `input-not-found`, `no-input`, `bad-jsonl`,
            `no-documents`, `data-in-use`, `preparation-damaged`.
    """
    paths = files(inputs, suffixes)
    parts = with_suffix(out, ".parts")
    parts.parent.mkdir(parents=True, exist_ok=True)
    with _lock(out):
        state = _begin(out, parts, _settings(paths, tokenizer, key))
        return _build(out, parts, state, paths, tokenizer, key, shard_tokens, advance)


def _build(
    out: Path,
    parts: Path,
    state: PrepareProgress,
    paths: Sequence[Path],
    tokenizer: Tokenizer,
    key: str,
    shard_tokens: int,
    advance: Advance,
) -> Card:
    if not state.joining:
        _write_shards(parts, state, documents(paths, key), tokenizer, shard_tokens, advance)
        if not state.documents:
            raise CppmegaError(
                "no-documents",
                f"None of the {state.read} documents read is in the dataset: {state.skipped}.",
                "Megatron cannot train on an empty dataset.",
                "other inputs",
            )
        state.joining = True
        _save(parts, state)
    return _join(out, parts, state, len(paths), tokenizer)


@contextmanager
def _lock(out: Path) -> Iterator[None]:
    """Allow one writer for each dataset."""
    lock = FileLock(with_suffix(out, ".lock"))
    try:
        with lock.acquire(timeout=0):
            yield
    except Timeout:
        raise CppmegaError(
            "data-in-use",
            f"Another process is preparing {out}.",
            "Both would write the same shards.",
            "wait for it, or choose another --out",
        ) from None
    with_suffix(out, ".lock").unlink(missing_ok=True)


def _settings(paths: Sequence[Path], tokenizer: Tokenizer, key: str) -> Settings:
    stats = [(str(path), path.stat()) for path in paths]
    inputs = tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
    return Settings(tokenizer.describe(), key, inputs)


def _begin(out: Path, parts: Path, settings: Settings) -> PrepareProgress:
    """Resume the progress of an earlier call, or begin anew."""
    saved = parts / "state.json"
    if saved.is_file():
        state = _load(parts, saved)
        if state.settings != settings:
            raise CppmegaError(
                "inputs-changed",
                f"{parts} was begun with other inputs or another tokenizer.",
                "One dataset would hold parts of two corpora.",
                f"use the same as before, or remove {parts} and start again",
            )
        for path in parts.iterdir():
            if path != saved and path.name.partition(".")[0] not in state.shards:
                path.unlink()  # a shard that was being written
        return state
    taken = [p for p in (with_suffix(out, s) for s in (".bin", ".idx", ".json")) if p.exists()]
    if taken:
        raise CppmegaError(
            "data-exists",
            f"{', '.join(str(path) for path in taken)} exists.",
            "A dataset is never overwritten: checkpoints and results name its fingerprint.",
            "choose another --out",
        )
    parts.mkdir(parents=True, exist_ok=True)
    state = PrepareProgress(settings)
    _save(parts, state)
    return state


def _load(parts: Path, saved: Path) -> PrepareProgress:
    try:
        return msgspec.convert(json.loads(saved.read_text()), PrepareProgress)
    except ValueError as error:
        raise CppmegaError(
            "preparation-damaged",
            f"{saved} cannot be read: {error}",
            "It records which shards are complete.",
            f"remove {parts} and start again",
        ) from None


def _save(parts: Path, state: PrepareProgress) -> None:
    durable.replace(parts / "state.json", json.dumps(msgspec.to_builtins(state)).encode())


def _write_shards(
    parts: Path,
    state: PrepareProgress,
    stream: Iterator[Document],
    tokenizer: Tokenizer,
    shard_tokens: int,
    advance: Advance,
) -> None:
    for document in islice(stream, state.read):
        advance(document.took)
    shard = _Shard(parts, f"{len(state.shards):06d}", tokenizer)
    try:
        for batch in _batches(stream):
            shard.add(batch, state.skipped)
            advance(sum(document.took for document in batch))
            if shard.tokens >= shard_tokens:
                shard.finish(state)
                shard = _Shard(parts, f"{len(state.shards):06d}", tokenizer)
        shard.finish(state)
    finally:
        shard.close()


def _batches(stream: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    for document in stream:
        batch.append(document)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


class _Shard:
    """One shard being written by Megatron's own builder."""

    def __init__(self, parts: Path, name: str, tokenizer: Tokenizer) -> None:
        self.parts, self.name, self.tokenizer = parts, name, tokenizer
        self.tokens = self.documents = self.read = 0
        self._builder = _builder(parts / f"{name}.bin.new", tokenizer.vocab_size)

    def add(self, batch: Sequence[Document], skipped: dict[str, int]) -> None:
        """Encode and write a batch; counts what is left out."""
        counts = Counter(document.problem for document in batch if document.problem)
        texts = [document.text for document in batch if not document.problem]
        try:
            encoded = self.tokenizer.encode(texts)
        except UnicodeDecodeError:
            encoded = []
            for text in texts:
                try:
                    encoded += self.tokenizer.encode([text])
                except UnicodeDecodeError:
                    counts["not UTF-8"] += 1
        for ids in encoded:
            ids.append(self.tokenizer.eod)
            self._builder.add_document(ids, [len(ids)])
            self.tokens += len(ids)
        self.documents += len(encoded)
        self.read += len(batch)
        for problem, count in counts.items():
            skipped[problem] = skipped.get(problem, 0) + count

    def close(self) -> None:
        """Close the data file; one that is not finished is removed by the next call."""
        self._builder.data_file.close()

    def finish(self, state: PrepareProgress) -> None:
        """Close the files, give them their names, then record that they are complete."""
        self._builder.finalize(str(self.parts / f"{self.name}.idx.new"))
        for suffix in (".bin", ".idx"):
            path = self.parts / f"{self.name}{suffix}"
            path.with_name(path.name + ".new").replace(path)
        state.shards.append(self.name)
        state.read += self.read
        state.documents += self.documents
        state.tokens += self.tokens
        _save(self.parts, state)


def _builder(path: Path, vocab_size: int) -> Any:
    try:
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    except ModuleNotFoundError:
        interpreter.require_torch(find_root(), "cppmega.data.command")
        raise
    return IndexedDatasetBuilder(str(path), dtype=DType.optimal_dtype(vocab_size))


def _join(
    out: Path, parts: Path, state: PrepareProgress, sources: int, tokenizer: Tokenizer
) -> Card:
    builder = _builder(parts / "whole.bin", tokenizer.vocab_size)
    for name in state.shards:
        builder.add_index(str(parts / name))
    builder.finalize(str(parts / "whole.idx"))
    data, index = digest(parts / "whole")
    card = Card(
        tokenizer=tokenizer.describe(),
        documents=state.documents,
        tokens=state.tokens,
        dtype=builder.dtype.__name__,
        bin_sha256=data,
        idx_sha256=index,
        sources=sources,
        skipped=state.skipped,
    )
    for suffix in (".bin", ".idx"):
        (parts / f"whole{suffix}").replace(with_suffix(out, suffix))
    new = parts / "card.new"
    new.write_text(card.dump())
    new.replace(with_suffix(out, ".json"))
    (parts / "state.json").unlink()  # first: without it the rest of the folder is rubbish
    shutil.rmtree(parts)
    return card
