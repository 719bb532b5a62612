"""matplotlib, imported only where something is drawn."""

from __future__ import annotations

from typing import Any

from cppmega.errors import CppmegaError


def pyplot() -> Any:
    """matplotlib's pyplot, drawing into files.

    Raises:
        CppmegaError: `package-missing`.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise CppmegaError(
            "package-missing",
            "matplotlib is not installed.",
            "It draws the curves; the table does not need it.",
            "pip install matplotlib, or leave --plot out",
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as drawing

    return drawing
