"""The command that builds a corpus of source code to train on: `scripts/code_corpus.py`."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import click

from cppmega.errors import CppmegaError
from cppmega.host import console, progress
from tools.code_corpus import archive as archives
from tools.code_corpus import download, listing, make


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--archive",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="The packed sources, such as code.tar.xz; downloaded and packed if it does not exist.",
)
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), help="Folder of the corpus."
)
@click.option(
    "--sources",
    default=listing.SHIPPED,
    type=click.Path(path_type=Path, dir_okay=False),
    help="A list of projects to use instead of the shipped one.",
)
@click.option(
    "--vocab-size", default=65536, show_default=True, help="Entries of the tokenizer.", type=int
)
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    help="Processes that encode the text; default: as many as the cores and the text allow.",
)
def main(
    archive: Path, out: Path | None, sources: Path, vocab_size: int, processes: int | None
) -> None:
    """Build a corpus of C, C++ and Python from published projects.

    Without --out, only the archive is built; that needs pip and a network connection. With --out,
    the tokenizer and the datasets OUT/train and OUT/heldout are built from the archive; that needs
    no network. An interrupted call resumes where it was; a finished corpus is never overwritten.
    """
    # Megatron warns about packages, ranks and devices that only training uses.
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")
    try:
        if not archive.exists():
            _pack(archive, listing.load(sources))
        if out is not None:
            _make(archive, out, vocab_size, processes)
    except CppmegaError as error:
        print(error.render(), file=sys.stderr)
        sys.exit(1)


def _pack(archive: Path, sources: tuple[listing.Source, ...]) -> None:
    files = {
        one: download.fetched(one, console.numbered(number, len(sources)))
        for number, one in enumerate(sources, 1)
    }
    with progress.of_bytes("packing", sum(file.stat().st_size for file in files.values())) as step:
        manifest = archives.pack(sources, files, archive, step)
    documents = sum(sum(project.documents.values()) for project in manifest.projects)
    print(f"{archive} {manifest.content[:16]} {documents} documents of {len(sources)} projects")


def _make(archive: Path, out: Path, vocab_size: int, processes: int | None) -> None:
    card = make.make(archive, out, vocab_size, progress.of_bytes, processes)
    for name, part in card.parts.items():
        print(
            f"{out / name} {part.fingerprint} {part.documents} documents {part.tokens} tokens, "
            f"{part.structure.said}"
        )
