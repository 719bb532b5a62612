"""Names that installed packages import, at top level or anywhere else.

Megatron tries dozens of optional packages. Where one is not installed, it gets whichever module of
that name comes first on the path.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from functools import lru_cache
from pathlib import Path

_IMPORTS = re.compile(
    rb"^[ \t]*import[ \t]+(?P<names>[\w.]+(?:[ \t]+as[ \t]+\w+)?(?:,[\w. \t]+)*)[ \t]*(?:#.*)?$"
    rb"|^[ \t]*from[ \t]+(?P<name>\w+)[\w.]*[ \t]+import\b"
    rb"|(?:import_module|find_spec|__import__)\(\s*[\"'](?P<called>\w+)",
    re.MULTILINE,
)
"""Prose such as `from the cache` or `import all of them` is no statement."""


def first_importers(names: Collection[str], packages: Iterable[Path]) -> dict[str, Path]:
    """A file of the packages that imports each name; names that none imports are left out."""
    files: dict[str, Path] = {}
    for package in packages if names else ():
        imported = _imported(package)
        files = {name: imported[name] for name in names if name in imported} | files
    return files


@lru_cache(maxsize=16)
def _imported(package: Path) -> dict[str, Path]:
    """The top-level names that the files of a package import, each with one of the files."""
    importers: dict[str, Path] = {}
    for where, _, files in os.walk(package):
        for file in (Path(where, name) for name in files if name.endswith(".py")):
            for line in _IMPORTS.finditer(file.read_bytes()):
                for name in (line["names"] or line["name"] or line["called"]).split(b","):
                    importers.setdefault(re.split(rb"\W", name.strip())[0].decode(), file)
    return importers
