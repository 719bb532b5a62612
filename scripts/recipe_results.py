"""Write recipes/results.json, the summary of benchmarks/results that ships with the recipes.

Run it after a measurement of a recipe; a test compares both.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from cppmega.recipe import results

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"


def summary() -> str:
    """The text of the file."""
    found = msgspec.json.encode(results.collect(BENCHMARKS))
    return msgspec.json.format(found, indent=1).decode() + "\n"


if __name__ == "__main__":
    results.summary_file().write_text(summary())
