"""The command that turns text into a dataset.

`scripts/prepare_data.py` and `python -m cppmega.data.command` are the same.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import click

from cppmega.data import encoding, sources, tokenizers
from cppmega.data import prepare as data
from cppmega.data.corpus import Card
from cppmega.errors import CppmegaError
from cppmega.host import console, progress


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("inputs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Path without suffix.")
@click.option("--tokenizer", default="byte", show_default=True, help="byte, or a tokenizer.json.")
@click.option("--eod", help="The token that ends a document, if the tokenizer names none.")
@click.option("--key", default="text", show_default=True, help="Field of a JSON line.")
@click.option(
    "--suffix", multiple=True, help="In folders, only files with this suffix; repeatable."
)
@click.option(
    "--structure",
    is_flag=True,
    help="Also write the syntactic kind and depth of every token: C, C++ and Python.",
)
@click.option(
    "--language-key", help="Field of a JSON line with the language or the file of its text."
)
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    help="Processes that encode the text (default: as many as the cores and the input allow).",
)
def main(
    inputs: tuple[Path, ...],
    out: Path,
    tokenizer: str,
    eod: str | None,
    key: str,
    suffix: tuple[str, ...],
    structure: bool,
    language_key: str | None,
    processes: int | None,
) -> None:
    """Build OUT.bin, OUT.idx and OUT.json from text files, .jsonl files and folders.

    An interrupted call resumes where it was; a finished dataset is never overwritten.
    """
    # Megatron warns about packages, ranks and devices that only training uses.
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")
    try:
        if language_key is not None and not structure:
            raise click.UsageError("--language-key is used only with --structure.")
        chosen = tokenizers.load(tokenizer, eod)
        total = sum(path.stat().st_size for path in sources.files(inputs, suffix))
        with progress.of_bytes(f"preparing {out.name}", total) as advance:
            card = data.prepare(
                out,
                inputs,
                chosen,
                key=key,
                suffixes=suffix,
                structure=structure,
                language_key=language_key,
                processes=processes or encoding.processes_for(total),
                advance=advance,
            )
        _report(out, card)
    except CppmegaError as error:
        print(error.render(), file=sys.stderr)
        sys.exit(1)


def _report(out: Path, card: Card) -> None:
    for reason, count in card.skipped.items():
        print(f"left out: {count} documents ({reason})", file=sys.stderr)
    parsed = f", {card.structure.said}" if card.structure is not None else ""
    print(f"{out} {card.fingerprint} {card.documents} documents {card.tokens} tokens{parsed}")


if __name__ == "__main__":
    with console.whole_answer():
        main()
