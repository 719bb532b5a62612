"""Encode documents as token ids and structure codes, in this process or in several.

The results come in the order of the documents and do not depend on the number of processes.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cppmega.data import structure_labels
from cppmega.data.sources import Document
from cppmega.data.tokenizers import Placed, Tokenizer
from cppmega.errors import CppmegaError
from cppmega.host import process

T = TypeVar("T")

_MOST = 32
"""Number of processes beyond which one writer cannot keep up."""
_WORTH = 4 << 20
"""Bytes of input that justify starting a process."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """One document of a dataset, its end included."""

    ids: Any
    """Token ids, int64 [tokens]."""
    codes: Any = None
    """Structure codes, uint8 [tokens]; None if they were not requested."""
    language: str = ""
    """With codes: its language, or why all of them are 0."""


@dataclass(slots=True)
class Batch:
    """The documents of a batch that are in the dataset, and why the others are not."""

    read: int
    """Documents, left-out ones included."""
    took: int
    """Bytes of input."""
    documents: list[Encoded] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    """Reason -> documents left out."""


def encode(documents: Sequence[Document], tokenizer: Tokenizer, structure: bool) -> Batch:
    """Encode a batch of documents.

    Args:
        documents: the batch.
        tokenizer: gives the ids, and with `structure` the places of the tokens.
        structure: whether every token gets its structure code.
    """
    batch = Batch(len(documents), sum(document.took for document in documents))
    batch.skipped.update(document.problem for document in documents if document.problem)
    texts = [document for document in documents if not document.problem]
    if structure:
        for document, placed in _encoded(texts, tokenizer.encode_placed, batch.skipped):
            batch.documents.append(_with_codes(document, placed, tokenizer.eod))
    else:
        for _, ids in _encoded(texts, tokenizer.encode, batch.skipped):
            batch.documents.append(Encoded(_ended(ids, tokenizer.eod)))
    return batch


def batches(
    stream: Iterator[Sequence[Document]], tokenizer: Tokenizer, structure: bool, processes: int
) -> Generator[Batch, None, None]:
    """Encode batches in their order.

    Args:
        stream: the batches; at most two for each process are read ahead.
        tokenizer: is copied to every process.
        structure: whether every token gets its structure code.
        processes: 1 encodes in this process.

    Raises:
        CppmegaError: `encoder-died`.
    """
    if processes == 1:
        yield from (encode(documents, tokenizer, structure) for documents in stream)
        return
    # Forked processes would inherit the tokenizer's locks without the threads that hold them.
    pool = ProcessPoolExecutor(
        processes, multiprocessing.get_context("spawn"), _begin_process, (os.getpid(),)
    )
    waiting: deque[Future[Batch]] = deque()
    try:
        for documents in stream:
            waiting.append(pool.submit(encode, documents, tokenizer, structure))
            if len(waiting) > 2 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise CppmegaError(
            "encoder-died",
            f"One of the {processes} processes that encode documents ended without an answer.",
            "The dataset would lack its documents.",
            "the same command again, which resumes; with a smaller --processes if the machine ran "
            "out of memory",
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def processes_for(size: int) -> int:
    """Number of processes to encode an input of `size` bytes with, by the cores of this process."""
    return max(1, min(len(os.sched_getaffinity(0)), _MOST, size // _WORTH))


def _begin_process(parent: int) -> None:
    """End with the parent, leave Ctrl-C to it, and use one thread."""
    process.end_with_parent(parent, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _encoded(
    documents: Sequence[Document],
    encode: Callable[[Sequence[bytes]], list[T]],
    skipped: Counter[str],
) -> list[tuple[Document, T]]:
    """The documents that are valid text, with the tokenizer's output for each."""
    try:
        return list(zip(documents, encode([one.text for one in documents]), strict=True))
    except UnicodeDecodeError:
        if len(documents) > 1:
            return [pair for one in documents for pair in _encoded([one], encode, skipped)]
        skipped["not UTF-8"] += 1
        return []


def _with_codes(document: Document, placed: Placed, eod: int) -> Encoded:
    """The ids of a document with their codes; its end has none."""
    import numpy as np

    of_bytes, parsed = structure_labels.of_bytes(document.text, document.language)
    codes = structure_labels.of_tokens(document.text, of_bytes, placed.begins, placed.ends)
    language = document.language or "no grammar"
    return Encoded(
        _ended(placed.ids, eod),
        np.append(codes, np.uint8(0)),
        language if parsed or not document.language else "not parsed",
    )


def _ended(ids: Sequence[int], eod: int) -> Any:
    import numpy as np

    return np.array([*ids, eod], np.int64)
