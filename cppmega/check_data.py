"""The command that reads complete datasets, however long that takes.

`scripts/check_data.py` and `python -m cppmega.check_data` are the same.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import click

from cppmega.data import corpus, structure_files, tokenizers
from cppmega.data import reading as data_reading
from cppmega.data import record as data_record
from cppmega.data.corpus import Corpus
from cppmega.data.record import Reading
from cppmega.errors import CppmegaError
from cppmega.host import console, progress


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("prefixes", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--tokenizer", help="byte, or a tokenizer.json [the one in the data's card].")
@click.option("--eod", help="End token of that tokenizer, if its files do not define it.")
@click.option(
    "--vocab-size", type=click.IntRange(1), help="Ids that are allowed [the tokenizer's]."
)
@click.option(
    "--zeros-are-data", is_flag=True, help="Blocks of zeros are data, not an unfinished copy."
)
def main(
    prefixes: tuple[Path, ...],
    tokenizer: str | None,
    eod: str | None,
    vocab_size: int | None,
    zeros_are_data: bool,
) -> None:
    """Read the datasets PREFIXES completely: every number of the index, every id, and the hashes.

    Structure ids that a dataset has are read as well.

    The result is kept in PREFIX.checked.json (in the cache folder if that cannot be written), and
    is valid for launches until one of the files changes. Exit status 0 if all is well.
    """
    try:
        own = tokenizers.load(tokenizer, eod).vocab_size if tokenizer is not None else None
        for number, prefix in enumerate(prefixes, 1):
            at = console.position(number, len(prefixes))
            print(_read(prefix, at, vocab_size or own, zeros_are_data), flush=True)
    except CppmegaError as error:
        print(error.render(), file=sys.stderr)
        sys.exit(1)


def _read(prefix: Path, at: str, vocab_size: int | None, zeros_are_data: bool) -> str:
    """Read a dataset; `at` is its place among all."""
    found = corpus.open_(prefix)
    read_one = functools.partial(_read_one, at)
    reading = read_one(found, zeros_are_data)
    allowed = vocab_size or _of_the_card(found)
    if allowed is not None:
        corpus.check_width(found, allowed)
    data_reading.check(found, reading, allowed or max(reading.highest + 1, 1))
    structure = found.card.structure if found.card is not None else None
    if structure is not None:
        structure_files.check(found, read_one)
    also = f", {structure.said}" if structure is not None else ""
    return (
        f"{prefix} {data_record.name(found)} {found.documents} documents {found.tokens} tokens, "
        f"ids {reading.lowest} to {reading.highest}, read at {reading.speed / 1e9:.2f} GB/s{also}"
    )


def _read_one(at: str, found: Corpus, zeros_are_data: bool = False) -> Reading:
    with progress.of_bytes(f"{at} reading {found.prefix.name}", found.size) as advance:
        return data_reading.read(found, advance=advance, zeros_are_data=zeros_are_data)


def _of_the_card(found: Corpus) -> int | None:
    return found.card.tokenizer.vocab_size if found.card is not None else None


if __name__ == "__main__":
    with console.whole_answer():
        main()
