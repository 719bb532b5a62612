"""Runs as data: the recipe, its validation, its arithmetic, and the arguments it renders to."""

from cppmega.recipe.recipe import M2RNN, Mamba2, Mamba3, NgramHash, Recipe, Structure

__all__ = ["M2RNN", "Mamba2", "Mamba3", "NgramHash", "Recipe", "Structure"]
