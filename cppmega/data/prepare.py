"""Turn text, JSONL or source trees into a Megatron dataset: resumable, never overwriting.

Documents are written in shards, each finished with a rename and an entry in
`PREFIX.parts/state.json`; a run that was killed resumes after the last one. The shards are then
joined, and the card with the fingerprint of the result is written last.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout

from cppmega.data import encoding, shards, sources, structure_labels
from cppmega.data.corpus import Card, Count, StructureRecord, digest, with_suffix
from cppmega.data.shards import Shard
from cppmega.data.sources import Document
from cppmega.data.structure import COLUMN, DEFINITION
from cppmega.data.tokenizers import Tokenizer, TokenizerRecord
from cppmega.errors import CppmegaError
from cppmega.host import durable, json_text

SHARD_TOKENS = 1 << 24
"""Tokens after which a shard is finished, and the most that are lost when the process is killed."""
_BATCH = 256
"""Documents encoded together, at most."""
_BATCH_BYTES = 1 << 20
"""Bytes of input after which a batch is complete."""

Advance = Callable[[int], None]


class StructureSettings(msgspec.Struct, frozen=True):
    """Everything except the text on which the structure ids of a preparation depend."""

    definition: int
    grammars: dict[str, str]
    """Package -> version."""
    language_key: str | None


class Settings(msgspec.Struct, frozen=True):
    """Inputs and tokenizer: a resumed preparation must have the same."""

    tokenizer: TokenizerRecord
    key: str
    inputs: tuple[tuple[str, int, int], ...]
    """Path, size and modification time (ns) of every input file."""
    structure: StructureSettings | None = None
    """None: the tokens get no structure ids."""


class PrepareProgress(msgspec.Struct):
    """The progress so far."""

    settings: Settings
    shards: list[str] = []
    read: Count = 0
    """Documents read, left-out ones included."""
    documents: Count = 0
    tokens: Count = 0
    skipped: dict[str, int] = {}
    languages: dict[str, int] = {}
    """Documents with structure ids, as in `StructureRecord`."""
    tokens_of: dict[str, int] = {}
    kinds_of: dict[str, int] = {}
    joining: bool = False


@dataclass(frozen=True, slots=True)
class _Job:
    """One call of `prepare`."""

    out: Path
    paths: Sequence[Path]
    tokenizer: Tokenizer
    settings: Settings
    shard_tokens: int
    processes: int
    advance: Advance

    @property
    def parts(self) -> Path:
        """The folder of the unfinished dataset."""
        return with_suffix(self.out, ".parts")

    def shard(self, state: PrepareProgress) -> Shard:
        """Begin the shard after those that are finished."""
        name = f"{len(state.shards):06d}"
        return Shard(self.parts, name, self.tokenizer, self.settings.structure is not None)


def prepare(
    out: Path,
    inputs: Sequence[Path],
    tokenizer: Tokenizer,
    *,
    key: str = "text",
    suffixes: Sequence[str] = (),
    structure: bool = False,
    language_key: str | None = None,
    shard_tokens: int = SHARD_TOKENS,
    processes: int = 1,
    advance: Advance = lambda took: None,
) -> Card:
    """Build `out.bin`, `out.idx` and `out.json`; resumes an interrupted call.

    Args:
        out: path without a suffix.
        inputs: text files, `.jsonl` files, folders.
        tokenizer: turns them into tokens.
        key: the field of a JSON line that holds the text.
        suffixes: in folders, only files with these endings; empty: every text file.
        structure: whether every token also gets its structure ids, in `out.structure.bin` and
            `out.structure.idx`.
        language_key: the field of a JSON line that names the language of its text, or the file
            that it is from; only for structure ids.
        shard_tokens: tokens after which a shard is finished.
        processes: encode the documents, with their structure; the result does not depend on it.
        advance: called with the bytes of input read, those of an earlier call included.

    Raises:
        CppmegaError: `data-exists`, `inputs-changed`, `input-not-found`, `no-input`, `bad-jsonl`,
            `data-in-use`, `preparation-damaged`, `language-unknown`, `package-missing`,
            `grammar-differs`, `encoder-died`.
    """
    paths = sources.files(inputs, suffixes)
    asked = _structure_settings(paths, structure, language_key)
    settings = Settings(tokenizer.describe(), key, _states(paths), asked)
    job = _Job(out, paths, tokenizer, settings, shard_tokens, processes, advance)
    out.parent.mkdir(parents=True, exist_ok=True)
    with lock(out):
        return _build(job, _begin(out, job.parts, settings))


def _structure_settings(
    paths: Sequence[Path], structure: bool, language_key: str | None
) -> StructureSettings | None:
    """Everything on which the structure ids depend; None if none are wanted.

    Raises:
        CppmegaError: `language-unknown`, `package-missing`, `grammar-differs`.
    """
    lines = next((path for path in paths if path.suffix == ".jsonl"), None)
    if structure and lines is not None and language_key is None:
        raise CppmegaError(
            "language-unknown",
            f"{lines} does not indicate by its name in which language its texts are.",
            "All of them would get the structure ids of a language without a grammar.",
            "name the field that holds the language, or the name of the file, with --language-key",
        )
    if not structure:
        return None
    return StructureSettings(DEFINITION, structure_labels.grammars(), language_key)


def _build(job: _Job, state: PrepareProgress) -> Card:
    if not state.joining:
        _write_shards(job, state)
        if not state.documents:
            raise CppmegaError(
                "no-input",
                f"None of the {state.read} documents read is in the dataset: {state.skipped}.",
                "Megatron cannot train on an empty dataset.",
                "other inputs",
            )
        state.joining = True
        _save(job.parts, state)
    return _join(job, state)


@contextmanager
def lock(out: Path) -> Iterator[None]:
    """Allow one writer for each dataset."""
    held = FileLock(with_suffix(out, ".lock"))
    try:
        with held.acquire(timeout=0):
            yield
    except Timeout:
        raise CppmegaError(
            "data-in-use",
            f"Another process is preparing {out}.",
            "Both would write the same shards.",
            "wait for it, or choose another --out",
        ) from None
    with_suffix(out, ".lock").unlink(missing_ok=True)


def _states(paths: Sequence[Path]) -> tuple[tuple[str, int, int], ...]:
    """Path, size and modification time of every input file."""
    stats = [(str(path), path.stat()) for path in paths]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _begin(out: Path, parts: Path, settings: Settings) -> PrepareProgress:
    """Resume the progress of an earlier call, or start from the beginning."""
    saved = parts / "state.json"
    if saved.is_file():
        state = _load(parts, saved)
        if state.settings != settings:
            raise CppmegaError(
                "inputs-changed",
                f"{parts} was started with other inputs, another tokenizer or other structure ids.",
                "One dataset would contain parts of two corpora.",
                f"use the same as before, or mv {parts} {parts}.old and start again",
            )
        for path in parts.iterdir():
            if path != saved and path.name.partition(".")[0] not in state.shards:
                path.unlink()  # a shard that was being written
        return state
    endings = (".bin", ".idx", f"{COLUMN}.bin", f"{COLUMN}.idx", ".json")
    taken = [path for path in (with_suffix(out, ending) for ending in endings) if path.exists()]
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
        return msgspec.convert(json_text.read(saved), PrepareProgress)
    except ValueError as error:
        raise CppmegaError(
            "preparation-damaged",
            f"{saved} cannot be read: {error}",
            "It records which shards are complete.",
            f"mv {parts} {parts}.old and start again",
        ) from None


def _save(parts: Path, state: PrepareProgress) -> None:
    durable.replace(parts / "state.json", json.dumps(msgspec.to_builtins(state)).encode())


def _write_shards(job: _Job, state: PrepareProgress) -> None:
    asked = job.settings.structure
    language_key = asked.language_key if asked is not None else None
    stream = sources.documents(job.paths, job.settings.key, language_key)
    for document in islice(stream, state.read):
        job.advance(document.took)
    shard = job.shard(state)
    encoded = encoding.batches(_batches(stream), job.tokenizer, asked is not None, job.processes)
    try:
        for batch in encoded:
            shard.add(batch)
            job.advance(batch.took)
            if shard.tokens >= job.shard_tokens:
                _finish(job.parts, state, shard)
                shard = job.shard(state)
        _finish(job.parts, state, shard)
    finally:
        shard.close()
        encoded.close()


def _finish(parts: Path, state: PrepareProgress, shard: Shard) -> None:
    """Finish a shard, then record that it is complete."""
    shard.finish()
    state.shards.append(shard.name)
    state.read += shard.read
    state.documents += shard.documents
    state.tokens += shard.tokens
    state.skipped = dict(Counter(state.skipped) + shard.skipped)
    state.languages = dict(Counter(state.languages) + shard.languages)
    state.tokens_of = dict(Counter(state.tokens_of) + shard.tokens_of)
    state.kinds_of = dict(Counter(state.kinds_of) + shard.kinds_of)
    _save(parts, state)


def _batches(stream: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in stream:
        batch.append(document)
        size += document.took
        if len(batch) == _BATCH or size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _join(job: _Job, state: PrepareProgress) -> Card:
    asked, parts = job.settings.structure, job.parts
    types = shards.join(parts, state.shards, job.tokenizer, asked is not None)
    data, index = digest(parts / "whole")
    card = Card(
        tokenizer=job.settings.tokenizer,
        documents=state.documents,
        tokens=state.tokens,
        dtype=types[""],
        bin_sha256=data,
        idx_sha256=index,
        sources=len(job.paths),
        skipped=state.skipped,
        structure=_structure_record(asked, state, parts) if asked is not None else None,
    )
    for column in types:
        for suffix in (".bin", ".idx"):
            (parts / f"whole{column}{suffix}").replace(with_suffix(job.out, column + suffix))
    new = parts / "card.new"
    new.write_text(card.dump())
    new.replace(with_suffix(job.out, ".json"))
    (parts / "state.json").unlink()  # first: without it, the rest of the folder is useless
    shutil.rmtree(parts)
    return card


def _structure_record(
    asked: StructureSettings, state: PrepareProgress, parts: Path
) -> StructureRecord:
    codes, index = digest(parts / f"whole{COLUMN}")
    return StructureRecord(
        definition=asked.definition,
        grammars=asked.grammars,
        tokenizer=state.settings.tokenizer.digest,
        documents=state.languages,
        tokens=state.tokens_of,
        with_kind=state.kinds_of,
        bin_sha256=codes,
        idx_sha256=index,
    )
