"""Make the shipped corpus of source code, and keep its card and how long it took.

usage: python -m benchmarks.code_corpus WORK [--out benchmarks/results]

WORK is a new folder, which needs 1 GB. Writes code_corpus.json and code_corpus.md. The clock starts
after the downloads. The archive is packed twice, and must have the same bytes.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path

import click
import msgspec

from benchmarks.harness import results
from cppmega import __version__
from tools.code_corpus import archive, download, listing, make
from tools.markdown import table


@click.command(help=__doc__)
@click.argument("work", type=click.Path(path_type=Path))
@results.out_option()
def main(work: Path, out: Path) -> None:
    work.mkdir(parents=True)
    seconds: dict[str, float] = {}

    @contextmanager
    def timed(title: str, total: int) -> Iterator[Callable[[int], None]]:
        started = time.perf_counter()
        print(f"{title}: {total / 1e6:.0f} MB", flush=True)
        yield lambda took: None
        seconds[title] = round(time.perf_counter() - started, 1)

    sources = listing.load()
    files = {source: download.fetched(source, print) for source in sources}
    packed, again = work / "code.tar.xz", work / "again.tar.xz"
    for path in (packed, again):
        with timed("packing", sum(file.stat().st_size for file in files.values())):
            archive.pack(sources, files, path)
    if packed.read_bytes() != again.read_bytes():
        raise SystemExit("two archives of the same projects differ")
    card = make.make(packed, work / "code", 65536, timed)
    result = {
        "date": date.today().isoformat(),
        "cppmega": __version__,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "seconds": seconds,
        "card": msgspec.to_builtins(card),
    }
    results.write(out, "code_corpus", result, page(result))


def page(result: dict[str, object]) -> str:
    """The card, and the seconds of each stage."""
    card = msgspec.convert(result["card"], make.CodeCard)
    stages = msgspec.convert(result["seconds"], dict[str, float])
    return results.page(
        card.markdown().rstrip("\n"),
        "## Time",
        f"On {result['cores']} cores, which other work shared, {result['date']}; the downloads are "
        "not counted, and packing is needed once.",
        table(("stage", "seconds"), ((stage, f"{value:.0f}") for stage, value in stages.items())),
    )


if __name__ == "__main__":
    main()
