"""The structure ids of a dataset on disk: are they complete, and do they belong to its tokens?"""

from __future__ import annotations

from collections.abc import Callable

from cppmega.data import corpus, index_file
from cppmega.data.corpus import Corpus, StructureRecord, with_suffix
from cppmega.data.record import Reading
from cppmega.data.structure import COLUMN, DEFINITION
from cppmega.errors import CppmegaError


def check(dataset: Corpus, read: Callable[[Corpus], Reading | None]) -> None:
    """Check the structure ids of a dataset as its tokens are checked.

    Args:
        dataset: the dataset.
        read: returns what a complete dataset contains; None: unknown, so only its index is read.

    Raises:
        CppmegaError: `structure-missing`, `structure-differs`, `data-broken`, `data-changed`, and
            what `corpus.open_` and `read` raise.
    """
    record = recorded(dataset)
    codes = _open(dataset)
    reading = read(codes)
    if reading is None:
        index_file.check_all(codes.index, codes.data_file.stat().st_size)
    elif (reading.bin_sha256, reading.idx_sha256) != (record.bin_sha256, record.idx_sha256):
        raise CppmegaError(
            "data-changed",
            f"{codes.prefix} is not what the card of {dataset.prefix} describes: its hash is "
            "different.",
            "The tokens would get the structure ids of other tokens.",
            "prepare the data again, under another name",
        )
    if not index_file.same_lengths(codes.index, dataset.index):
        raise _other(dataset, "its documents have other lengths")


def recorded(dataset: Corpus) -> StructureRecord:
    """The card's record of a dataset's structure ids.

    Raises:
        CppmegaError: `structure-missing`, `structure-differs`.
    """
    record = dataset.card.structure if dataset.card is not None else None
    if record is None:
        raise CppmegaError(
            "structure-missing",
            f"{dataset.prefix} has no structure ids: "
            + (
                "it has no card."
                if dataset.card is None
                else "it was prepared without --structure."
            ),
            "The structure embedding would get no input, and never learn.",
            "python -m cppmega.data.command --structure --out PREFIX TEXT..., then --data PREFIX",
        )
    if record.definition != DEFINITION:
        raise CppmegaError(
            "structure-differs",
            f"The structure ids of {dataset.prefix} are of definition {record.definition}; this "
            f"release of cppmega has definition {DEFINITION}.",
            "The same number would mean another kind or depth.",
            "prepare the data again with --structure, or train with the release that made it",
        )
    return record


def _open(dataset: Corpus) -> Corpus:
    """Open the files of the structure ids, one byte for each token."""
    prefix = with_suffix(dataset.prefix, COLUMN)
    files = [with_suffix(prefix, suffix) for suffix in (".bin", ".idx")]
    missing = [path for path in files if not path.is_file()]
    if missing:
        raise CppmegaError(
            "structure-missing",
            f"{dataset.prefix} has structure ids by its card, but there is no {missing[0]}.",
            "A part of the dataset was not copied, or was removed.",
            "copy the dataset again, with all files of that name",
        )
    codes = corpus.open_(prefix)
    there = (codes.tokens, codes.documents, codes.index.sequences, codes.dtype)
    if there != (dataset.tokens, dataset.documents, dataset.index.sequences, "uint8"):
        raise _other(
            dataset,
            f"it has {codes.tokens} numbers in {codes.documents} documents as {codes.dtype}, and "
            f"the tokens are {dataset.tokens} in {dataset.documents}",
        )
    return codes


def _other(dataset: Corpus, what: str) -> CppmegaError:
    files = with_suffix(dataset.prefix, COLUMN)
    return index_file.broken(files, f"it does not match the tokens of {dataset.prefix}: {what}")
