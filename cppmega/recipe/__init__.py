"""Runs as data: the recipe, its checks, its arithmetic, and the arguments rendered from it."""

from cppmega.recipe.recipe import M2RNN, GraphPool, Mamba3, NgramHash, Recipe, Structure

__all__ = ["M2RNN", "GraphPool", "Mamba3", "NgramHash", "Recipe", "Structure"]
