"""The long description of a wheel: the README without links to files of the repository.

A package index resolves no relative link, and an installed wheel has the linked files elsewhere.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_PICTURE = re.compile(r"^!\[[^\]]*\]\((?!https?://)[^)]*\)\n", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?://|#)[^)]*\)")


def without_relative_links(readme: str) -> str:
    """Drop pictures that lie in the repository, and keep only the text of links into it."""
    return _LINK.sub(r"\1", _PICTURE.sub("", readme))


class LongDescription(MetadataHookInterface):
    """Derive the wheel's description from README.md."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the field `readme`, which pyproject.toml declares as dynamic."""
        readme = (Path(self.root) / "README.md").read_text()
        text = without_relative_links(readme)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
