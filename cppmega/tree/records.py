"""RECORD, the list of files that every installed wheel has: the owner and the hash of each file.

`megatron` has no `__init__.py`: several distributions install below it, each with its own list.
"""

from __future__ import annotations

import base64
import csv
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path


@lru_cache(maxsize=64)
def hashes(data: bytes) -> Mapping[str, str]:
    """Path -> SHA-256 in hex; files without a hash (RECORD itself, bytecode) are left out."""
    by_path: dict[str, str] = {}
    for row in csv.reader(data.decode(errors="replace").splitlines()):
        if len(row) == 3 and row[1].startswith("sha256="):
            digest = row[1].removeprefix("sha256=")
            try:
                by_path[row[0]] = base64.urlsafe_b64decode(digest + "=" * (-len(digest) % 4)).hex()
            except ValueError:
                by_path[row[0]] = "torn"  # matches no hash, so that the file counts as edited
    return by_path


def of_packages(root: Path, packages: tuple[str, ...]) -> dict[str, tuple[str, str]]:
    """Path -> (distribution, SHA-256) for the files of some packages, from every RECORD in ROOT.

    Most lists do not mention them, and some have ten thousand lines, so only matches are parsed.
    """
    owners: dict[str, tuple[str, str]] = {}
    wanted = tuple(f"{package}/".encode() for package in packages)
    for folder in sorted(root.glob("*.dist-info")):
        try:
            data = (folder / "RECORD").read_bytes()
        except OSError:
            continue
        if not any(data.startswith(name) or b"\n" + name in data for name in wanted):
            continue
        lines = [line for line in data.splitlines() if line.startswith(wanted)]
        name = folder.name.removesuffix(".dist-info").replace("_", "-")
        for path, digest in hashes(b"\n".join(lines)).items():
            owners.setdefault(path, (name, digest))
    return owners
