"""The measurements of recipes among the result files that ship with the package."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from cppmega.host import json_text
from cppmega.host.paths import shipped


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One measurement of a recipe."""

    recipe: str
    headline: str
    date: str = ""
    changes: tuple[str, ...] = ()
    """`field=value` that the run set; empty: the recipe as it ships."""
    file: str = ""
    """Name of the result file."""


def measured() -> list[Result]:
    """Every shipped result of a recipe."""
    return collect(shipped("benchmarks/results"))


def collect(folder: Path) -> list[Result]:
    """The results of recipes among the JSON files of a folder; files of other kinds are skipped."""
    results = []
    for path in sorted(folder.glob("*.json")):
        try:
            result = json_text.decode(path.read_bytes(), Result)
        except msgspec.DecodeError:
            continue
        results.append(msgspec.structs.replace(result, file=path.name))
    return results


def last_result(name: str, results: Iterable[Result]) -> Result | None:
    """The newest result of a recipe, preferably unchanged; None if it was never measured."""
    own = [result for result in results if result.recipe == name]
    return max(own, key=lambda one: (not one.changes, one.date, one.headline), default=None)
