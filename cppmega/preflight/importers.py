"""Names that installed packages import, at top level or anywhere else.

Megatron tries dozens of optional packages. Where one is not installed, it gets whichever module of
that name comes first on the path.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from pathlib import Path

_BY_NAME = ("import_module", "find_spec", "__import__")


_LINES = re.compile(
    rb"^[ \t]*(?:import[ \t]+(?P<names>[\w., \t]+)|from[ \t]+(?P<name>\w+))"
    rb"|(?:import_module|find_spec|__import__)\(\s*[\"'](?P<called>\w+)",
    re.MULTILINE,
)


def first_importers(names: Collection[str], packages: Iterable[Path]) -> dict[str, Path]:
    """A file of the packages that imports each name; names that none imports are left out."""
    found: dict[str, Path] = {}
    for package in packages if names else ():
        mentioned = _mentioned(package)
        for name in names:
            for file in mentioned.get(name, ()) if name not in found else ():
                if name in _imported(file):
                    found[name] = file
                    break
    return found


@lru_cache(maxsize=16)
def _mentioned(package: Path) -> dict[str, list[Path]]:
    """The files with a line that seems to import a name, such as a docstring's `from the`."""
    found: dict[str, list[Path]] = {}
    for file in _files(package):
        names: set[bytes] = set()
        for line in _LINES.finditer(file.read_bytes()):
            names |= {line["name"] or line["called"] or b""}
            names |= {
                part.strip().partition(b".")[0] for part in (line["names"] or b"").split(b",")
            }
        for name in names:
            found.setdefault(name.partition(b" ")[0].decode(), []).append(file)
    return found


def _files(package: Path) -> Iterator[Path]:
    for where, _, files in os.walk(package):
        yield from (Path(where) / name for name in files if name.endswith(".py"))


@lru_cache(maxsize=256)
def _imported(file: Path) -> frozenset[str]:
    """Top-level names that a file really imports."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return frozenset()
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.Call) and node.args:
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            asked = node.args[0]
            if called in _BY_NAME and isinstance(asked, ast.Constant):
                found.add(str(asked.value).partition(".")[0])
    return frozenset(found)
