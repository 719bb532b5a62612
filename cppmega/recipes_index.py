"""Recipes: found by shipped name or by path, loaded by path, listed with their numbers."""

from __future__ import annotations

import ast
import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cppmega import catalogue, dsa_widths, loading
from cppmega.arguments import missing
from cppmega.arithmetic import flops, megatron_flops, parameters
from cppmega.errors import CppmegaError
from cppmega.memory import estimate
from cppmega.page import Page
from cppmega.recipe import Recipe
from cppmega.wanted import provided, wanted_patches

NEWEST = "0.19.2"
"""The release that the list speaks of where no other is named."""
_PACKAGE = Path(__file__).resolve().parent


def folder() -> Path:
    """Where the shipped recipes lie: below the package in a wheel, beside it in a checkout."""
    below = _PACKAGE / "recipes"
    return below if below.is_dir() else _PACKAGE.parent / "recipes"


def shipped() -> list[str]:
    """Names of the shipped recipes, sorted."""
    return sorted(path.stem for path in folder().glob("*.py"))


def file_of(name: str) -> Path:
    """Where the recipe of that shipped name, or of that path, lies or would lie."""
    return Path(name) if name.endswith(".py") else folder() / f"{name}.py"


def load(name: str) -> Recipe:
    """The recipe of that shipped name, or of that file.

    Raises:
        CppmegaError: `recipe-unknown`, `recipe-broken`, or what making the recipe raises.
    """
    path = file_of(name)
    if not path.is_file():
        near = difflib.get_close_matches(name, shipped(), n=1)
        raise CppmegaError(
            "recipe-unknown",
            f"There is no recipe {name}." + (f" Did you mean {near[0]}?" if near else ""),
            f"Shipped are {', '.join(shipped())}; a path ends in .py.",
            "cppmega recipes",
        )
    module = _module(path)
    recipe = getattr(module, "RECIPE", None)
    if not isinstance(recipe, Recipe) or recipe.name != path.stem:
        found = f"a {type(recipe).__name__}" if not isinstance(recipe, Recipe) else recipe.name
        raise CppmegaError(
            "recipe-broken",
            f"{path} must define RECIPE, a Recipe with the name {path.stem}; found {found}.",
            "Logs, results and run folders are found by that name.",
            f"RECIPE = Recipe(name='{path.stem}', ...)",
        )
    return recipe


def _module(path: Path) -> Any:
    def failed(what: str) -> CppmegaError:
        return _broken(path, what, f"python {path}")

    try:
        return loading.load(f"cppmega_recipe_{path.stem}", path, failed)
    except CppmegaError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and (path.parent / f"{cause.name}.py").is_file():
            beside = path.parent / f"{cause.name}.py"
            what = f"raises {type(cause).__name__}: {cause}"
            raise _broken(path, what, f"write what {beside} holds into {path}") from cause
        raise


def _broken(path: Path, what: str, command: str) -> CppmegaError:
    return CppmegaError(
        "recipe-broken",
        f"{path} cannot be loaded: it {what}.",
        "A recipe is one Python file that defines RECIPE: the run folder keeps a copy of it alone.",
        command,
    )


def with_text(recipe: Recipe, assignments: Iterable[str]) -> Recipe:
    """Apply `field=value` words from a command line, each value as Python would write it.

    Raises:
        CppmegaError: `bad-assignment`, or what `Recipe.with_` raises.
    """
    changes: dict[str, Any] = {}
    for text in assignments:
        name, equals, value = text.partition("=")
        if not equals:
            raise CppmegaError(
                "bad-assignment",
                f"{text!r} is no field=value.",
                "It is not clear what to change.",
                "--set micro_batch_size=2",
            )
        if name == "name":
            raise CppmegaError(
                "bad-assignment",
                f"{text!r} changes the name of the recipe, which is that of its file.",
                "Its runs could not be found by it.",
                "--name NAME names the run folder; a recipe of your own is a file of that name",
            )
        try:
            changes[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            changes[name] = value  # a word such as tilelang
    return recipe.with_(**changes)


def describe(recipe: Recipe, pages: Mapping[str, Page], version: str = NEWEST) -> dict[str, Any]:
    """Everything the list says of one recipe."""
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
    """Date and headline of the newest committed result of a recipe; None: never measured.

    A result of the recipe as it is shipped comes before one of a changed recipe.
    """
    results = results or _PACKAGE.parent / "benchmarks" / "results"
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
    """What `cppmega recipes` prints: one JSON object, or a table with a block per recipe."""
    pages = catalogue.load()
    rows = [describe(load(name), pages, version) for name in shipped()]
    if as_json:
        return json.dumps({"schema": 1, "megatron": version, "recipes": rows}, indent=1)
    lines = [_line("NAME", "GPUS", "PARAMETERS", "MEMORY/GPU", "PRECISION", "PURPOSE")]
    for row in rows:
        lines.append(
            _line(
                row["name"],
                str(row["gpus"] or "cpu"),
                _count(row["parameters"]),
                f"{row['memory_gib_per_gpu']:.0f} GiB" if row["gpus"] else "-",
                row["precision"],
                row["purpose"],
            )
        )
        lines.append(f"    patches   {', '.join(row['patches']) or 'none'}")
        result = row["last_result"]
        said = f"{result['headline']} ({result['date']})" if result else "never measured"
        lines.append(f"    measured  {said}")
        lines += [f"    missing   {gap['part']}: {gap['reason']}" for gap in row["missing"]]
    return "\n".join(lines)


def _count(number: int) -> str:
    return f"{number / 1e9:.3f} B" if number >= 1e8 else f"{number / 1e6:.3f} M"


def _line(name: str, gpus: str, size: str, memory: str, precision: str, purpose: str) -> str:
    return f"{name:<24} {gpus:>4} {size:>10} {memory:>10} {precision:<9} {purpose}"
