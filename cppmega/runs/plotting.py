"""matplotlib, imported only when something is drawn, and its output files."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from cppmega.errors import CppmegaError

COLOURS = ("#c44e52", "#4c72b0", "#55a868", "#8172b3", "#ccb974", "#64b5cd", "#8c613c", "#937860")


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
            "It is needed to draw the curves, but not for the table.",
            "pip install matplotlib, or leave --plot out",
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as drawing

    return drawing


def write(figure: Any, target: Path) -> None:
    """Write a figure in the format that the suffix of the file names, and close it.

    Raises:
        CppmegaError: `plot-format-unknown`, `write-failed`.
    """
    suffix = target.suffix.lower().removeprefix(".")
    if suffix not in figure.canvas.get_supported_filetypes():
        raise CppmegaError(
            "plot-format-unknown",
            f"{target} has no suffix that names an image format.",
            "The suffix of the file determines the format.",
            f"--plot {target.with_suffix('.png')}; .svg and .pdf are others",
        )
    drawn = io.BytesIO()
    with pyplot().rc_context({"svg.fonttype": "none"}):
        figure.savefig(drawn, format=suffix, dpi=120)
    pyplot().close(figure)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(drawn.getvalue())
    except OSError as error:
        raise CppmegaError(
            "write-failed",
            f"{target} cannot be written: {error.strerror or error}.",
            "The plot would be missing where someone expects it.",
            "--plot FILE, in a folder that this user may write",
        ) from error
