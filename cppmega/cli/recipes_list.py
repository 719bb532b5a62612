"""The list of shipped recipes, with their numbers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from cppmega.catalogue import loader as catalogue
from cppmega.catalogue.page_rules import provided
from cppmega.host.table import Row, table
from cppmega.overlay.wanted import wanted_patches
from cppmega.page import Page
from cppmega.recipe import Recipe
from cppmega.recipe.arithmetic import flops, megatron_flops, parameters
from cppmega.recipe.index import load, shipped
from cppmega.recipe.memory import estimate
from cppmega.recipe.render import missing
from cppmega.recipe.results import Result, last_result, measured
from cppmega.sizes import dsa_widths

NEWEST = "0.19.2"
"""The release that the list is about where no other is named."""

_HEAD = Row(("NAME", "GPUS", "PARAMETERS", "MEMORY/GPU", "PRECISION", "PURPOSE"))
_NUMBERS = (1, 2, 3)
"""The columns that hold numbers."""


def describe(
    recipe: Recipe,
    pages: Mapping[str, Page],
    results: Iterable[Result],
    version: str = NEWEST,
) -> dict[str, Any]:
    """Everything that the list reports about one recipe."""
    widened = provided(pages.values(), dsa_widths.TILELANG)
    attends = bool(provided(pages.values(), dsa_widths.ATTENTION))
    counts = parameters(recipe)
    last = last_result(recipe.name, results)
    lacking = () if recipe.kind == "loop" else missing(recipe, version)
    return {
        "name": recipe.name,
        "purpose": recipe.purpose,
        "kind": recipe.kind,
        "precision": recipe.precision,
        "gpus": recipe.gpus,
        "parameters": counts.total,
        "parameters_of_mtp": counts.mtp,
        "memory_gib_per_gpu": round(estimate(recipe, widened, attends).gib, 1),
        "gflop_per_token": round(flops(recipe) / 1e9, 3),
        "gflop_per_token_by_megatron": round(megatron_flops(recipe) / 1e9, 3),
        "patches": list(wanted_patches(recipe, pages)),
        "gates": dict(recipe.gates),
        "missing": [{"part": item.part, "reason": item.reason} for item in lacking],
        "last_result": (
            {"date": last.date, "headline": last.headline, "file": last.file} if last else None
        ),
    }


def list_recipes(as_json: bool = False, version: str = NEWEST) -> str:
    """The output of `cppmega recipes`: one JSON object, or a table with details below each row."""
    pages = catalogue.load()
    results = measured()
    rows = [describe(load(name), pages, results, version) for name in shipped()]
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
    measured = f"{result['headline']} ({result['date']})" if result else "not measured"
    yield f"    measured  {measured}"
    for gap in described["missing"]:
        yield f"    missing   {gap['part']}: {gap['reason']}"


def _count(number: int) -> str:
    return f"{number / 1e9:.3f} B" if number >= 1e8 else f"{number / 1e6:.3f} M"
