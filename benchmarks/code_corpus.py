"""Make the shipped corpus of source code, and keep its card and how long it took.

usage: python -m benchmarks.code_corpus WORK [--out benchmarks/results]

WORK is a new folder, which needs 1 GB. Writes code_corpus.json and code_corpus.md. The projects are
downloaded before the clock starts, unless they are in the cache; making the corpus takes minutes on
two cores. The archive is packed twice, and must have the same bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path

import msgspec

from benchmarks import RESULTS
from cppmega import __version__
from cppmega.data.code import archive, download, listing, make


def main() -> None:
    """Make the corpus, and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.work.mkdir(parents=True)
    seconds: dict[str, float] = {}

    @contextmanager
    def timed(title: str, total: int) -> Iterator[Callable[[int], None]]:
        started = time.perf_counter()
        print(f"{title}: {total / 1e6:.0f} MB", flush=True)
        yield lambda took: None
        seconds[title] = round(time.perf_counter() - started, 1)

    sources = listing.load()
    files = {source: download.fetched(source, print) for source in sources}
    packed, again = options.work / "code.tar.xz", options.work / "again.tar.xz"
    for path in (packed, again):
        with timed("packing", sum(file.stat().st_size for file in files.values())):
            archive.pack(sources, files, path)
    if packed.read_bytes() != again.read_bytes():
        raise SystemExit("two archives of the same projects differ")
    card = make.make(packed, options.work / "code", 65536, timed)
    result = {
        "date": date.today().isoformat(),
        "cppmega": __version__,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "seconds": seconds,
        "card": msgspec.to_builtins(card),
    }
    (options.out / "code_corpus.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.out / "code_corpus.md").write_text(page(result))


def page(result: dict[str, object]) -> str:
    """The card, and the seconds of each stage."""
    card = msgspec.convert(result["card"], make.CodeCard)
    stages = msgspec.convert(result["seconds"], dict[str, float])
    lines = [
        card.markdown(),
        "## Time",
        "",
        f"On {result['cores']} cores, which other work shared, {result['date']}; the downloads are "
        "not counted, and packing is needed once.",
        "",
        "| stage | seconds |",
        "| --- | --- |",
        *(f"| {stage} | {value:.0f} |" for stage, value in stages.items()),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
