"""megatron-core wheels of any version: downloaded once, unpacked, kept in the user's cache."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from cppmega.errors import CppmegaError
from cppmega.host import env

_GLIBC = (39, 35, 34, 31, 28, 27, 24, 17)
_PYTHONS = ("3.12", "3.11")
"""Wheels up to 0.16.1 are built for 3.11, later ones for 3.12; only their text matters here."""


def cache() -> Path:
    """The folder for wheels: `CPPMEGA_CACHE`, else the user's cache folder."""
    chosen = env.CACHE.read()
    if chosen is not None:
        return chosen
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cppmega"


def unpacked(version: str, say: Callable[[str], None]) -> Path:
    """ROOT of the unpacked wheel of a version; downloads it with pip if necessary.

    The folder is shared and must stay pristine: copy it before patching.

    Raises:
        CppmegaError: `no-wheel`.
    """
    place = cache() / "trees" / version
    if not place.is_dir():
        wheel = _download(version, say)
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as scratch:
            unpack(wheel, Path(scratch) / "tree")
            try:
                (Path(scratch) / "tree").rename(place)
            except OSError:  # another process was faster
                if not place.is_dir():
                    raise
    return place


def unpack(wheel: Path, where: Path) -> None:
    """Unpack a wheel into a folder.

    Raises:
        CppmegaError: `no-wheel`, if the file is not a wheel.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(where)
    except (zipfile.BadZipFile, FileNotFoundError) as error:
        raise CppmegaError(
            "no-wheel",
            f"{wheel} is not a wheel: {error}.",
            "There is nothing to compare with.",
            "pass a version, a .whl file or a folder that holds megatron/",
        ) from None


def _download(version: str, say: Callable[[str], None]) -> Path:
    place = cache() / "wheels"
    place.mkdir(parents=True, exist_ok=True)
    known = sorted(place.glob(f"megatron_core-{version}-*.whl"))
    if known:
        return known[0]
    say(f"downloading megatron-core {version}")
    errors = []
    for python in _PYTHONS:
        platforms = [f"--platform=manylinux_2_{v}_x86_64" for v in _GLIBC]
        command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp"]
        command += [*platforms, "--dest", str(place), f"megatron-core=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        known = sorted(place.glob(f"megatron_core-{version}-*.whl"))
        if known:
            return known[0]
        errors += [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    raise CppmegaError(
        "no-wheel",
        f"pip found no wheel of megatron-core {version}. " + " ".join(errors[-1:]),
        "Its texts cannot be compared.",
        "pip index versions megatron-core",
    )
