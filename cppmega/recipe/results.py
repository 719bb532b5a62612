"""What was measured with the shipped recipes.

The result files lie in `benchmarks/results`; `scripts/recipe_results.py` writes what
`cppmega recipes` shows of them next to the recipes, so that the command reads one small file.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from cppmega.recipe import index


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One measurement of a recipe."""

    recipe: str
    headline: str
    date: str = ""
    changes: tuple[str, ...] = ()
    """`field=value` that the run set; empty: the recipe as it ships."""
    file: str = ""
    """Name of the result file."""


def summary_file() -> Path:
    """The summary of all results, which ships next to the recipes."""
    return index.folder() / "results.json"


def measured() -> list[Result]:
    """Every result in the summary."""
    return msgspec.json.decode(summary_file().read_bytes(), type=list[Result])


def collect(folder: Path) -> list[Result]:
    """The results of recipes among the JSON files of a folder; files of other kinds are skipped."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            result = msgspec.json.decode(path.read_bytes(), type=Result)
        except msgspec.DecodeError:
            continue
        found.append(msgspec.structs.replace(result, file=path.name))
    return found


def last_result(name: str, results: Iterable[Result]) -> Result | None:
    """The newest result of a recipe, unchanged recipes first; None if it was never measured."""
    own = [result for result in results if result.recipe == name]
    return max(own, key=lambda one: (not one.changes, one.date, one.headline), default=None)
