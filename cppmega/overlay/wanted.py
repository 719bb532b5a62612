"""The pages that a recipe requires."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cppmega.errors import CppmegaError
from cppmega.host.containment import contained
from cppmega.page import Page
from cppmega.recipe import Recipe

Question = Callable[[Recipe], bool]


def wanted_patches(recipe: Recipe, pages: Mapping[str, Page]) -> tuple[str, ...]:
    """List the patches that a recipe names, and those that its field values require.

    Raises:
        CppmegaError: `page-failed`.
    """
    asked = _asked({n: p.patch.wanted_by for n, p in pages.items() if p.patch.wanted_by}, recipe)
    return tuple(dict.fromkeys((*recipe.patches, *asked)))


def _asked(questions: Mapping[str, Question], recipe: Recipe) -> list[str]:
    """Return the pages whose `wanted_by` is true for a recipe.

    All are supervised together: to compare the process with what it was costs far more than an
    answer. Only a change that is found after the last answer is not known to be of one page; then
    each is asked alone.
    """
    page, asked = "", []

    def failed(what: str) -> CppmegaError:
        return CppmegaError(
            "page-failed",
            f"`wanted_by` of {page or ', '.join(questions)} {what}.",
            f"It is not known whether recipe {recipe.name} may start without the patch.",
            "correct the page; `wanted_by` takes a recipe and returns True or False",
        )

    try:
        with contained(failed):
            for page, wanted_by in questions.items():
                answer = wanted_by(recipe)
                if not isinstance(answer, bool):
                    raise failed(f"returns {type(answer).__name__}, not True or False")
                asked += [page] if answer else []
            page = page if len(questions) == 1 else ""
    except CppmegaError:
        for name in questions if not page else ():
            _asked({name: questions[name]}, recipe)
        raise
    return asked
