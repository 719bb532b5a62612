"""Turn an archive of source code into two datasets and the tokenizer of the first; resumable.

`OUT/train` and `OUT/heldout` are datasets with structure ids, `OUT/tokenizer` is the tokenizer,
`OUT/card.json` and `OUT/card.md` are written last.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import msgspec

from cppmega.data import corpus, encoding, prepare, sources, structure_labels, tokenizers
from cppmega.data.corpus import Card
from cppmega.errors import CppmegaError
from cppmega.host import durable
from tools.code_corpus import archive as archives
from tools.code_corpus import bpe
from tools.code_corpus.archive import Manifest
from tools.code_corpus.card import CodeCard, of_part, part_record
from tools.code_corpus.listing import PARTS, Part

Shown = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Takes a title and a number of bytes; shows progress while its block runs."""
_STATE = "state.json"


class _State(msgspec.Struct, frozen=True):
    """The inputs with which a preparation was started, and its unpacked archive once complete."""

    archive: str
    vocab_size: int
    manifest: Manifest | None = None


@dataclass(frozen=True, slots=True)
class _Job:
    out: Path
    archive: Path
    vocab_size: int
    processes: int | None
    shown: Shown

    @property
    def work(self) -> Path:
        """The folder of the unpacked sources."""
        return self.out / "work"

    def paths(self, part: Part) -> list[Path]:
        """The documents of a part."""
        return sources.files([self.work / part], ())


def make(
    archive: Path, out: Path, vocab_size: int, shown: Shown, processes: int | None = None
) -> CodeCard:
    """Train the tokenizer, and prepare both parts with their structure.

    Args:
        archive: as `archive.pack` wrote it.
        out: a folder; what an interrupted call has left in it is reused.
        vocab_size: entries of the tokenizer.
        shown: shows the progress.
        processes: encode the documents; None: as many as the cores and the text allow.

    Raises:
        CppmegaError: `data-exists`, `inputs-changed`, `data-in-use`, `archive-broken`,
            `vocabulary-not-filled`, `package-missing`, `grammar-differs`, and what
            `prepare.prepare` raises.
    """
    job = _Job(out, archive, vocab_size, processes, shown)
    grammars = structure_labels.grammars()  # before minutes of work
    job.out.mkdir(parents=True, exist_ok=True)
    with prepare.lock(out / "corpus"):
        state = _resumed_or_new(job)
        manifest = state.manifest or _unpacked(job, state)
        tokenizer = _tokenizer(job)
        cards = {part: _prepared(job, part, tokenizer) for part in PARTS}
        card = CodeCard(
            command=f"python -m tools.code_corpus.command --archive {archive.name} "
            f"--out {out.name}",
            archive=state.archive,
            archive_bytes=archive.stat().st_size,
            content=manifest.content,
            tokenizer=tokenizer.describe(),
            packages={"tokenizers": metadata.version("tokenizers"), **grammars},
            parts={p: part_record(card, of_part(manifest, p)) for p, card in cards.items()},
            projects=manifest.projects,
        )
        _finish(job, card)
    return card


def _resumed_or_new(job: _Job) -> _State:
    """The state left by an earlier call, or a new one in an empty folder."""
    with job.archive.open("rb") as file:
        asked = _State(hashlib.file_digest(file, "sha256").hexdigest(), job.vocab_size)
    saved = job.work / _STATE
    if not saved.is_file():
        _refuse_existing(job)
        job.work.mkdir(exist_ok=True)
        _save(job, asked)
        return asked
    state = msgspec.json.decode(saved.read_bytes(), type=_State)
    if (state.archive, state.vocab_size) != (asked.archive, asked.vocab_size):
        raise CppmegaError(
            "inputs-changed",
            f"{job.out} was started with another archive, or another vocabulary size.",
            "One corpus would contain parts of two.",
            f"use the same as before, or mv {job.out} {job.out}.old and start again",
        )
    return state


def _refuse_existing(job: _Job) -> None:
    found = sorted(path.name for path in job.out.iterdir() if path.suffix != ".lock")
    if found and found != [job.work.name]:
        raise CppmegaError(
            "data-exists",
            f"{job.out} holds {', '.join(found[:5])}.",
            "A dataset is never overwritten: checkpoints and results name its fingerprint.",
            "choose another --out",
        )


def _save(job: _Job, state: _State) -> None:
    durable.replace(job.work / _STATE, json.dumps(msgspec.to_builtins(state)).encode())


def _unpacked(job: _Job, state: _State) -> Manifest:
    for part in PARTS:  # from a call that was stopped
        shutil.rmtree(job.work / part, ignore_errors=True)
    with job.shown("unpacking", job.archive.stat().st_size) as advance:
        manifest = archives.extract(job.archive, job.work, advance)
    _save(job, msgspec.structs.replace(state, manifest=manifest))
    return manifest


def _tokenizer(job: _Job) -> tokenizers.HuggingFaceTokenizer:
    folder = job.out / "tokenizer"
    if not (folder / "tokenizer.json").is_file():
        paths = job.paths("train")
        with job.shown("training the tokenizer", _size(paths)) as advance:
            bpe.train(_texts(paths, advance), job.vocab_size, folder)
    return tokenizers.HuggingFaceTokenizer(folder)


def _texts(paths: list[Path], advance: Callable[[int], None]) -> Iterator[str]:
    for path in paths:
        text = path.read_bytes()
        advance(len(text))
        yield text.decode()


def _prepared(job: _Job, part: Part, tokenizer: tokenizers.HuggingFaceTokenizer) -> Card:
    out = job.out / part
    unfinished = corpus.with_suffix(out, ".parts").exists()
    if not unfinished and (card := corpus.read_card(out)) is not None:
        return card
    size = _size(job.paths(part))
    with job.shown(f"preparing {part}", size) as advance:
        return prepare.prepare(
            out,
            [job.work / part],
            tokenizer,
            structure=True,
            processes=job.processes or encoding.processes_for(size),
            advance=advance,
        )


def _size(paths: list[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def _finish(job: _Job, card: CodeCard) -> None:
    """Write the card; if a call is stopped here, the next one completes it."""
    text = json.dumps(msgspec.to_builtins(card), indent=1) + "\n"
    durable.replace(job.out / "card.md", card.markdown().encode())
    durable.replace(job.out / "card.json", text.encode())
    licenses = job.out / "licenses"
    if not licenses.exists():
        (job.work / "licenses").replace(licenses)
    shutil.rmtree(job.work)
