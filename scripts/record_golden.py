"""Record the hashes of the patched files of every supported version: tests/golden/*.json.

Inspect `cppmega diff PAGE` before you commit new hashes: they declare that the bytes are intended.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support import laws


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "pages",
        nargs="*",
        metavar="PAGE",
        help="pages to record, besides all pages together (default: every page; hashes of pages "
        "that no longer exist are removed)",
    )
    names = parser.parse_args().pages
    for name in names:
        if name not in laws.names():
            parser.error(f"there is no page {name}")
    with tempfile.TemporaryDirectory(prefix="cppmega-golden-") as scratch:
        os.environ["TESTS_SCRATCH"] = scratch  # for trees of several packages
        record(names or laws.names())
    if not names:
        _remove_others()


def record(names: list[str]) -> None:
    """Write the hashes of some pages, and of all pages together, where they have changed."""
    laws.GOLDEN.mkdir(exist_ok=True)
    for name in [*names, laws.TOGETHER]:
        file = laws.GOLDEN / f"{name}.json"
        text = json.dumps(laws.golden(name), indent=1, sort_keys=True) + "\n"
        old = file.read_text() if file.exists() else ""
        if text != old:
            file.write_text(text)
            print(f"{'changed' if old else 'new':<8} {file.name}")


def _remove_others() -> None:
    for file in laws.GOLDEN.glob("*.json"):
        if file.stem not in {*laws.names(), laws.TOGETHER}:
            file.unlink()
            print(f"{'removed':<8} {file.name}")


if __name__ == "__main__":
    main()
