"""matplotlib, imported only when something is drawn, and its output files."""

from __future__ import annotations

import html
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cppmega.errors import CppmegaError

COLOURS = ("#c44e52", "#4c72b0", "#55a868", "#8172b3", "#ccb974", "#64b5cd", "#8c613c", "#937860")
_PAGES = (".html", ".htm")
_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font-family: sans-serif; margin: 2rem auto; max-width: 84rem; padding: 0 1rem; }}
svg {{ height: auto; max-width: 100%; }}
pre {{ overflow-x: auto; }}
</style>
</head>
<body>
<h1>{title}</h1>
{picture}
<pre>{text}</pre>
</body>
</html>
"""


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


def write(figure: Any, target: Path, title: str, text: Iterable[str]) -> None:
    """Write a figure in the format that the suffix of the file names, and close it.

    An HTML file needs no other file: it has the picture and the text.

    Args:
        text: what the command printed, for an HTML file.

    Raises:
        CppmegaError: `plot-format-unknown`, `write-failed`.
    """
    as_page = target.suffix.lower() in _PAGES
    suffix = "svg" if as_page else target.suffix.lower().removeprefix(".")
    if suffix not in figure.canvas.get_supported_filetypes():
        raise CppmegaError(
            "plot-format-unknown",
            f"{target} has no suffix that names an image format.",
            "The suffix of the file determines the format.",
            f"--plot {target.with_suffix('.png')}; .svg, .pdf and .html are others",
        )
    drawn = io.BytesIO()
    with pyplot().rc_context({"svg.fonttype": "none"}):
        figure.savefig(drawn, format=suffix, dpi=120)
    pyplot().close(figure)
    data = _page(title, drawn.getvalue().decode(), text) if as_page else drawn.getvalue()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    except OSError as error:
        raise CppmegaError(
            "write-failed",
            f"{target} cannot be written: {error.strerror or error}.",
            "The plot would be missing where someone expects it.",
            "--plot FILE, in a folder that this user may write",
        ) from error


def _page(title: str, svg: str, text: Iterable[str]) -> bytes:
    picture = svg[svg.index("<svg") :]  # the XML prolog belongs only in a standalone file
    lines = "\n".join(text)
    page = _PAGE.format(title=html.escape(title), picture=picture, text=html.escape(lines))
    return page.encode()
