"""Documents encoded in several processes: the same as in one, and no answer is not lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

import numpy as np
import pytest

from cppmega.data import encoding
from cppmega.data.sources import Document
from cppmega.data.tokenizers import ByteTokenizer, Placed
from cppmega.errors import CppmegaError
from tests.tools.code_corpus.projects import c, python

BATCHES = [
    [Document(python(name).encode(), 10, "", "python"), Document(c(name).encode(), 20, "", "c")]
    for name in ("one", "two", "three", "four", "five", "six", "seven")
]
BATCHES[3] += [
    Document(b"\xff\0", 2, "binary"),
    Document(b"words ", 6),
    Document(b"}{", 2, "", "c"),
]


class Deadly(ByteTokenizer):
    """Ends the process that encodes with it, as a machine without memory does."""

    def encode_placed(self, documents: Sequence[bytes]) -> list[Placed]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def test_two_processes_give_what_one_does() -> None:
    alone, both = (
        list(encoding.batches(iter(BATCHES), ByteTokenizer(), True, count)) for count in (1, 2)
    )
    assert len(alone) == len(BATCHES)
    for one, other in zip(alone, both, strict=True):
        assert (one.read, one.took, one.skipped) == (other.read, other.took, other.skipped)
        for a, b in zip(one.documents, other.documents, strict=True):
            assert a.language == b.language
            assert np.array_equal(a.ids, b.ids) and np.array_equal(a.codes, b.codes)
    assert alone[3].skipped == {"binary": 1} and alone[3].took == 40
    assert [one.language for one in alone[3].documents] == [
        *("python", "c", "no grammar", "not parsed")
    ]


def test_a_process_that_dies_is_noticed() -> None:
    with pytest.raises(CppmegaError, match="One of the 2 processes") as caught:
        list(encoding.batches(iter(BATCHES), Deadly(), True, 2))
    assert caught.value.name == "encoder-died"


def test_small_inputs_are_not_worth_a_process() -> None:
    assert encoding.processes_for(0) == encoding.processes_for(1000) == 1
    assert encoding.processes_for(1 << 40) == min(len(os.sched_getaffinity(0)), 32)
