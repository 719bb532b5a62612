"""The list of shipped recipes, with their numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cppmega.catalogue import loader as catalogue
from cppmega.host.paths import PACKAGE
from cppmega.host.table import Row, table
from cppmega.overlay.wanted import provided, wanted_patches
from cppmega.page import Page
from cppmega.recipe import Recipe, dsa_widths
from cppmega.recipe.arithmetic import flops, megatron_flops, parameters
from cppmega.recipe.index import load, shipped
from cppmega.recipe.memory import estimate
from cppmega.recipe.render import missing

NEWEST = "0.19.2"
"""The release that the list is about, unless another is named."""

_HEAD = Row(("NAME", "GPUS", "PARAMETERS", "MEMORY/GPU", "PRECISION", "PURPOSE"))
_NUMBERS = (1, 2, 3)
"""The columns that hold numbers."""


def describe(recipe: Recipe, pages: Mapping[str, Page], version: str = NEWEST) -> dict[str, Any]:
    """Everything that the list states about one recipe."""
    widened = provided(pages.values(), dsa_widths.TILELANG)
    counts = parameters(recipe)
    lacking = () if recipe.kind == "loop" else missing(recipe, version)
    return {
        "name": recipe.name,
        "purpose": recipe.purpose,
        "kind": recipe.kind,
        "precision": recipe.precision,
        "gpus": recipe.gpus,
        "parameters": counts.total,
        "parameters_of_mtp": counts.mtp,
        "memory_gib_per_gpu": round(estimate(recipe, widened).gib, 1),
        "gflop_per_token": round(flops(recipe) / 1e9, 3),
        "gflop_per_token_by_megatron": round(megatron_flops(recipe) / 1e9, 3),
        "patches": list(wanted_patches(recipe, pages)),
        "gates": dict(recipe.gates),
        "missing": [{"part": item.part, "reason": item.reason} for item in lacking],
        "last_result": last_result(recipe.name),
    }


def last_result(name: str, results: Path | None = None) -> dict[str, str] | None:
    """Date and headline of the newest committed result of a recipe; None if it has none.

    A result of the recipe as it is shipped comes before one of a changed recipe.
    """
    results = results or PACKAGE.parent / "benchmarks" / "results"
    found = []
    for path in sorted(results.glob("*.json")):
        try:
            data = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if isinstance(data, Mapping) and data.get("recipe") == name and "headline" in data:
            shipped_one = not data.get("changes")
            said = str(data.get("date", "")), str(data["headline"]), path.name
            found.append((shipped_one, *said))
    if not found:
        return None
    _, date, headline, file = max(found)
    return {"date": date, "headline": headline, "file": file}


def list_recipes(as_json: bool = False, version: str = NEWEST) -> str:
    """The output of `cppmega recipes`: one JSON object, or a table with details below each row."""
    pages = catalogue.load()
    rows = [describe(load(name), pages, version) for name in shipped()]
    if as_json:
        return json.dumps({"schema": 1, "megatron": version, "recipes": rows}, indent=1)
    title, *lines = table([_HEAD, *map(_row, rows)], right=_NUMBERS)
    below = ("\n".join([line, *_details(row)]) for line, row in zip(lines, rows, strict=True))
    return "\n".join([title, *below])


def _row(described: Mapping[str, Any]) -> Row:
    gpus = described["gpus"]
    memory = f"{described['memory_gib_per_gpu']:.0f} GiB" if gpus else "-"
    size = _count(described["parameters"])
    precision, purpose = described["precision"], described["purpose"]
    return Row((described["name"], str(gpus or "cpu"), size, memory, precision, purpose))


def _details(described: Mapping[str, Any]) -> Iterator[str]:
    result = described["last_result"]
    yield f"    patches   {', '.join(described['patches']) or 'none'}"
    measured = f"{result['headline']} ({result['date']})" if result else "never measured"
    yield f"    measured  {measured}"
    for gap in described["missing"]:
        yield f"    missing   {gap['part']}: {gap['reason']}"


def _count(number: int) -> str:
    return f"{number / 1e9:.3f} B" if number >= 1e8 else f"{number / 1e6:.3f} M"
