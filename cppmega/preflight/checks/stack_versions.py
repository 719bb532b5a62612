"""The installed torch, CUDA, Transformer Engine and kernels match the recipe's stack."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.specifiers import SpecifierSet

from cppmega.errors import CppmegaError
from cppmega.host import packages as stack
from cppmega.preflight.context import Context
from cppmega.preflight.findings import NotApplicable, refuse
from cppmega.recipe import Recipe


def check(context: Context) -> str:
    """Compare versions by the packages' metadata.

    Raises:
        CppmegaError: `stack-differs`.
    """
    if context.recipe is None or not context.recipe.stack:
        raise NotApplicable("no recipe declares a stack")
    refuse(_wrong_versions(context.recipe))
    return ", ".join(f"{name} {stack.version(name)}" for name, _ in context.recipe.stack)


def _wrong_versions(recipe: Recipe) -> Iterator[CppmegaError]:
    for name, versions in recipe.stack:
        installed = stack.version(name)
        pip = stack.to_install(*(("torch",) if name == "cuda" else (name, versions)))
        if installed is None:
            yield CppmegaError(
                "stack-differs",
                f"Recipe {recipe.name} requires {name} {versions}, which is not installed.",
                "The run would end late, or fall back to something slower.",
                f"pip install {pip}",
            )
        elif not SpecifierSet(versions).contains(installed, prereleases=True):
            yield CppmegaError(
                "stack-differs",
                f"Recipe {recipe.name} requires {name} {versions}; installed is {installed}.",
                "The recipe was proved and measured with another stack.",
                f"pip install {pip}, or a recipe with another stack",
            )
