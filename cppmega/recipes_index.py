"""The former name of `cppmega.recipe.index`, which recipes kept in run folders import.

Deprecated: removed in 0.3.
"""

from cppmega.recipe.index import load

__all__ = ["load"]
