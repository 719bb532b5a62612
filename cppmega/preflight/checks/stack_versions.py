"""Installed torch, CUDA, Transformer Engine and kernels are those the recipe was made for."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.specifiers import SpecifierSet

from cppmega.errors import CppmegaError
from cppmega.host import packages as stack
from cppmega.preflight.context import Context
from cppmega.preflight.findings import NotApplicable, refuse
from cppmega.recipe import Recipe

AFTER: tuple[str, ...] = ()


def check(context: Context) -> str:
    """Compare versions by the packages' metadata.

    Raises:
        CppmegaError: `stack-missing`, `stack-differs`.
    """
    if context.recipe is None or not context.recipe.stack:
        raise NotApplicable("no recipe names the versions it was made for")
    refuse(_found(context.recipe))
    return ", ".join(f"{name} {stack.version(name)}" for name, _ in context.recipe.stack)


def _found(recipe: Recipe) -> Iterator[CppmegaError]:
    for name, versions in recipe.stack:
        found = stack.version(name)
        pip = "torch" if name == "cuda" else name
        if found is None:
            yield CppmegaError(
                "stack-missing",
                f"Recipe {recipe.name} is made for {name} {versions}; there is none.",
                "The run would end late, or fall back to something slower.",
                f"pip install '{pip}{versions if name != 'cuda' else ''}'",
            )
        elif not SpecifierSet(versions).contains(found, prereleases=True):
            yield CppmegaError(
                "stack-differs",
                f"Recipe {recipe.name} is made for {name} {versions}; installed is {found}.",
                "What was proved and measured is another stack.",
                f"pip install '{pip}{versions if name != 'cuda' else ''}', or a recipe with "
                "another stack",
            )
