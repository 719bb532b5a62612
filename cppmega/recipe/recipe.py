"""A run as data: model, parallel layout and training. Typed, frozen, additive; without torch.

A recipe is changed only with `with_` (fields by name) and `plus` (further arguments at the end):
there is no string of default flags that could be replaced as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from cppmega.errors import CppmegaError, closest, suggestion
from cppmega.recipe import field_types, validate
from cppmega.recipe.fields import Fields
from cppmega.sizes.embeddings import NgramHash, Structure
from cppmega.sizes.mixers import M2RNN, Mamba2, Mamba3

__all__ = ["M2RNN", "Mamba2", "Mamba3", "NgramHash", "Recipe", "Structure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe(Fields):
    """One run that can be trained.

    Raises:
        CppmegaError: `recipe-invalid`, `width-not-aligned`, `bad-pattern`, `bad-accept`.
    """

    def __post_init__(self) -> None:
        field_types.check(self)
        validate.check(self)

    def with_(self, **changes: Any) -> Recipe:
        """A copy of the recipe with some fields changed.

        Raises:
            CppmegaError: `unknown-field` with the nearest name, or what construction raises.
        """
        known = {field.name for field in fields(self)} - {"arguments"}
        for name in changes:
            if name == "arguments":
                raise CppmegaError(
                    "unknown-field",
                    "Recipe.arguments cannot be replaced.",
                    "A replaced list of flags would silently drop the previous ones.",
                    "-- --flag value adds to it; in Python: recipe.plus('--flag', 'value')",
                )
            if name not in known:
                near = closest(name, known)
                raise CppmegaError(
                    "unknown-field",
                    f"Recipe has no field {name}." + suggestion(near),
                    "The change would have no effect.",
                    f"--set {near[0]}=..."
                    if near
                    else "the fields are those of cppmega.recipe.Recipe",
                )
        return replace(self, **changes)

    def plus(self, *arguments: str) -> Recipe:
        """A copy of the recipe with further Megatron arguments.

        Raises:
            CppmegaError: `recipe-invalid` for an argument that no recipe may hold.
        """
        return replace(self, arguments=(*self.arguments, *arguments))
