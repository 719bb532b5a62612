"""The `CPPMEGA_*` variables that the package itself reads: their names, meanings and parsers.

Pages declare further variables in their headers: gates, and whatever else the patched code reads.

Example:
    >>> env.CACHE.read({"CPPMEGA_CACHE": "/scratch/wheels"})
    PosixPath('/scratch/wheels')
    >>> env.ALLOW_WRAPPER.read({})
    ()
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

T_co = TypeVar("T_co", covariant=True)

PREFIX = "CPPMEGA_"
"""Every variable of the package and of its pages begins with this."""
ON = frozenset(("1", "true", "on", "yes"))
"""Values of a switch that is on, in any case."""


def is_on(text: str) -> bool:
    """Whether the text of a switch turns it on."""
    return text.strip().lower() in ON


@dataclass(frozen=True, slots=True)
class Variable(Generic[T_co]):
    """One environment variable."""

    name: str
    meaning: str
    parse: Callable[[str], T_co]
    """Converts the variable's text to its value; an unset variable is an empty text."""
    of_one_run: bool = False
    """Set by cppmega for the processes of one run, and never by a user."""

    def read(self, environ: Mapping[str, str] = os.environ) -> T_co:
        """The value in an environment, by default that of this process."""
        return self.parse(environ.get(self.name, ""))


def _optional_path(text: str) -> Path | None:
    return Path(text) if text else None


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


CACHE = Variable(
    "CPPMEGA_CACHE",
    "folder for downloaded wheels (default: the user's cache folder)",
    _optional_path,
)
RUNS = Variable(
    "CPPMEGA_RUNS",
    "folder of the run folders (default: ./runs)",
    lambda text: Path(text or "runs"),
)
ALLOW_WRAPPER = Variable(
    "CPPMEGA_ALLOW_WRAPPER",
    "wrappers of patched code that are intended: module:qualname,...",
    _words,
)
ALLOW_FALLBACK = Variable(
    "CPPMEGA_ALLOW_FALLBACK",
    "pages whose declined calls Megatron's own code may compute: page,...",
    _words,
)
VERBOSE = Variable(
    "CPPMEGA_VERBOSE",
    "1: the guard's log names every patch that the first step has reached, or need not reach",
    is_on,
)
LINEAR_CE_KERNEL = Variable(
    "CPPMEGA_LINEAR_CE_KERNEL",
    "backend of the linear cross-entropy (default: auto)",
    lambda text: text or "auto",
)
LINEAR_CE_UPSTREAM = Variable(
    "CPPMEGA_LINEAR_CE_UPSTREAM",
    "arbitrary: the loss weights tokens by more than its mask (default: weighted-scalar)",
    lambda text: text or "weighted-scalar",
)
INDEX_CACHE = Variable(
    "CPPMEGA_INDEX_CACHE",
    "1: DSA layers share chosen keys, as the page dsa_index_share describes",
    is_on,
)
DSA_INDEX_PATTERN = Variable(
    "CPPMEGA_DSA_INDEX_PATTERN",
    "with CPPMEGA_INDEX_CACHE=1: F or S for each DSA layer of the decoder, Full or Shared",
    str.strip,
)
DSA_KEY_PER_HEAD = Variable(
    "CPPMEGA_DSA_KEY_PER_HEAD",
    "1: DSA's attention has a key per head, as the page dsa_key_per_head describes",
    is_on,
)
DSA_INDEXER_ROWS = Variable(
    "CPPMEGA_DSA_INDEXER_ROWS",
    "order of rows in a checkpoint's DSA indexers that does not record it: stock or page",
    str.strip,
)
NGRAM_HASH = Variable(
    "CPPMEGA_NGRAM_HASH",
    "sizes of a model's n-gram hash embedding, as JSON; set by the trainer from its recipe",
    str.strip,
)
STRUCTURE = Variable(
    "CPPMEGA_STRUCTURE",
    "sizes of a model's structure embedding, as JSON; set by the trainer from its recipe",
    str.strip,
)
MAMBA3 = Variable(
    "CPPMEGA_MAMBA3",
    "sizes of a model's Mamba-3 mixers, as JSON; set by the trainer from its recipe",
    str.strip,
)
M2RNN = Variable(
    "CPPMEGA_M2RNN",
    "sizes of a model's M2RNN mixers, as JSON; set by the trainer from its recipe",
    str.strip,
)
OVERLAY = Variable(
    "CPPMEGA_OVERLAY",
    "digest of the overlay that child processes must hold; set by cppmega.run",
    str,
    of_one_run=True,
)
ROOT = Variable(
    "CPPMEGA_ROOT",
    "folder that child processes must import megatron from; set by cppmega.run",
    _optional_path,
    of_one_run=True,
)
GUARDED_BY = Variable(
    "CPPMEGA_GUARDED_BY",
    "address of the ledger that child processes write to; set by cppmega.run",
    str,
    of_one_run=True,
)
PYTHON = Variable(
    "CPPMEGA_PYTHON",
    "version and prefix of the Python whose child processes join the run; set by cppmega.run",
    str,
    of_one_run=True,
)
RUN = Variable(
    "CPPMEGA_RUN",
    "the run folder; set by cppmega launch for its ranks",
    _optional_path,
    of_one_run=True,
)

VARIABLES: tuple[Variable[object], ...] = (
    *(CACHE, RUNS, ALLOW_WRAPPER, ALLOW_FALLBACK, VERBOSE),
    *(LINEAR_CE_KERNEL, LINEAR_CE_UPSTREAM),
    *(INDEX_CACHE, DSA_INDEX_PATTERN, DSA_INDEXER_ROWS),
    *(NGRAM_HASH, STRUCTURE, MAMBA3, M2RNN),
    *(OVERLAY, ROOT, GUARDED_BY, PYTHON, RUN),
)
NAMES = frozenset(variable.name for variable in VARIABLES)
OF_ONE_RUN = tuple(variable.name for variable in VARIABLES if variable.of_one_run)
"""Variables that, in the environment of a new launch, are left over from another run."""
