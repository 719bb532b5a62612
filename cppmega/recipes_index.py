"""The former name of `cppmega.recipe.index`, which recipes kept in run folders import.

To be removed in the release after the next one.
"""

from cppmega.recipe.index import load

__all__ = ["load"]
