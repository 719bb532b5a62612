"""Finding and loading recipes, by shipped name or by path."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cppmega.errors import CppmegaError, did_you_mean
from cppmega.host import load_file, paths
from cppmega.recipe import Recipe


def folder() -> Path:
    """The folder of the shipped recipes."""
    return paths.shipped("recipes")


def shipped() -> list[str]:
    """Names of the shipped recipes, sorted."""
    return sorted(path.stem for path in folder().glob("*.py"))


def file_of(name: str) -> Path:
    """The path of a recipe, whether the file exists or not; `name` is a shipped name or a path."""
    return Path(name) if name.endswith(".py") else folder() / f"{name}.py"


def load(name: str) -> Recipe:
    """Load a recipe by its shipped name, or from a file.

    Raises:
        CppmegaError: `recipe-unknown`, `recipe-broken`, or what creating the recipe raises.
    """
    path = file_of(name)
    if not path.is_file():
        longer = [other for other in shipped() if other.startswith(name)]
        raise CppmegaError(
            "recipe-unknown",
            f"There is no recipe {name}." + did_you_mean(name, longer or shipped()),
            f"Shipped are {', '.join(shipped())}; a path ends in .py.",
            "cppmega recipes",
        )
    module = _module(path)
    recipe = getattr(module, "RECIPE", None)
    if not isinstance(recipe, Recipe) or recipe.name != path.stem:
        defined = f"a {type(recipe).__name__}" if not isinstance(recipe, Recipe) else recipe.name
        raise CppmegaError(
            "recipe-broken",
            f"{path} must define RECIPE, a Recipe with the name {path.stem}; found {defined}.",
            "Logs, results and run folders are named after it.",
            f"RECIPE = Recipe(name='{path.stem}', ...)",
        )
    return recipe


def _module(path: Path) -> Any:
    def failed(what: str) -> CppmegaError:
        return _broken(path, what, f"python {path}")

    try:
        return load_file.load(f"cppmega_recipe_{path.stem}", path, failed)
    except CppmegaError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and (path.parent / f"{cause.name}.py").is_file():
            beside = path.parent / f"{cause.name}.py"
            what = f"raises {type(cause).__name__}: {cause}"
            raise _broken(path, what, f"move the content of {beside} into {path}") from cause
        raise


def _broken(path: Path, what: str, command: str) -> CppmegaError:
    return CppmegaError(
        "recipe-broken",
        f"{path} cannot be loaded: it {what}.",
        "A recipe is one Python file that defines RECIPE: the run folder keeps only a copy of it.",
        command,
    )


def with_text(recipe: Recipe, assignments: Iterable[str]) -> Recipe:
    """Apply `field=value` words from a command line; each value is a Python literal or a word.

    Raises:
        CppmegaError: `bad-assignment`, or what `Recipe.with_` raises.
    """
    changes: dict[str, Any] = {}
    for text in assignments:
        name, equals, value = text.partition("=")
        if not equals:
            raise CppmegaError(
                "bad-assignment",
                f"{text!r} is not of the form field=value.",
                "It does not name what to change.",
                "--set micro_batch_size=2",
            )
        if name == "name":
            raise CppmegaError(
                "bad-assignment",
                f"{text!r} would change the name of the recipe, which is that of its file.",
                "Its runs could not be found by that name.",
                "--name NAME names the run folder; a new recipe needs its own file",
            )
        try:
            changes[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            changes[name] = value  # a word such as tilelang
    return recipe.with_(**changes)
