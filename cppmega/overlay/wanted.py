"""The pages that a recipe requires, and what those pages provide."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from cppmega.errors import CppmegaError
from cppmega.host.containment import contained
from cppmega.page import Page
from cppmega.recipe import Recipe


def wanted_patches(recipe: Recipe, pages: Mapping[str, Page]) -> tuple[str, ...]:
    """List the patches that a recipe names, and those that its field values require.

    Raises:
        CppmegaError: `bad-wanted-by`.
    """
    asked = (
        name
        for name, page in pages.items()
        if page.patch.wanted_by is not None and _wanted(name, page.patch.wanted_by, recipe)
    )
    return tuple(dict.fromkeys((*recipe.patches, *asked)))


def provided(pages: Iterable[Page], name: str) -> tuple[Any, ...]:
    """The values that these pages provide under a name, in the order of the pages."""
    return tuple(value for page in pages for value in page.patch.provides.get(name, ()))


def _wanted(page: str, wanted_by: Callable[[Recipe], bool], recipe: Recipe) -> bool:
    def failed(what: str) -> CppmegaError:
        return CppmegaError(
            "bad-wanted-by",
            f"`wanted_by` of {page} {what}.",
            f"It is not known whether recipe {recipe.name} may start without the patch.",
            "correct the page; `wanted_by` takes a recipe and returns True or False",
        )

    with contained(failed):
        answer = wanted_by(recipe)
    if not isinstance(answer, bool):
        raise failed(f"returns {type(answer).__name__}, not True or False")
    return answer
