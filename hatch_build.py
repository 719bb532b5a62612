"""The project's addresses, and the long description of a wheel, from one setting of pyproject.toml.

A package index resolves no relative link, and an installed wheel has the linked files elsewhere:
links to files of the repository lead to its address, if there is one, and are only text else.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_PICTURE = re.compile(r"^!\[[^\]]*\]\((?!https?://)[^)]*\)\n", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?://|#)([^)]*)\)")


def urls(repository: str, documentation: str, version: str) -> dict[str, str]:
    """The urls of a distribution; none of the repository while it has no address."""
    found = {"Documentation": documentation} if documentation else {}
    if repository:
        found["Repository"] = repository
        found["Issues"] = f"{repository}/issues"
        found["Changelog"] = f"{repository}/blob/v{version}/CHANGELOG.md"
    return found


def without_relative_links(readme: str, files: str) -> str:
    """Drop pictures that lie in the repository, and let links into it begin with `files`."""
    target = rf"[\1]({files}/\2)" if files else r"\1"
    return _LINK.sub(target, _PICTURE.sub("", readme))


class Addresses(MetadataHookInterface):
    """Derive the urls, and the description from README.md where a distribution has that one."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the fields `urls` and `readme`, as far as the project declares them as dynamic."""
        home = Path(__file__).parent
        pyproject = tomllib.loads((home / "pyproject.toml").read_text())
        stated = pyproject["tool"]["hatch"]["metadata"]["hooks"]["custom"]
        repository, version = stated["repository"].rstrip("/"), pyproject["project"]["version"]
        if "urls" in metadata["dynamic"]:
            metadata["urls"] = urls(repository, stated["documentation"], version)
        if "readme" in metadata["dynamic"]:
            files = f"{repository}/blob/v{version}" if repository else ""
            text = without_relative_links((home / "README.md").read_text(), files)
            metadata["readme"] = {"content-type": "text/markdown", "text": text}
