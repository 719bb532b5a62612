"""Wheels of the distributions that pages target: downloaded once, unpacked, kept in the cache."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from cppmega.errors import CppmegaError
from cppmega.host import env
from cppmega.tree.installed import PACKAGES

_GLIBC = (39, 35, 34, 31, 28, 27, 24, 17)
_PYTHONS = ("3.12", "3.11")
"""Wheels are built for some versions of Python only; only their text matters here."""
_CHOICES: Sequence[Sequence[str]] = (
    *(
        (
            *("--only-binary=:all:", f"--python-version={python}", "--implementation=cp"),
            *(f"--platform=manylinux_2_{glibc}_x86_64" for glibc in _GLIBC),
        )
        for python in _PYTHONS
    ),
    ("--no-binary=:all:", "--no-build-isolation"),
)
"""Options of `pip download`, for a wheel of any platform and then for the sources."""


def cache() -> Path:
    """The folder for wheels: `CPPMEGA_CACHE`, else the user's cache folder."""
    chosen = env.CACHE.read()
    if chosen is not None:
        return chosen
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cppmega"


def unpacked(version: str, say: Callable[[str], None], distribution: str = "megatron-core") -> Path:
    """ROOT of the unpacked wheel of a version; downloads it with pip if necessary.

    A distribution without wheels is unpacked from its sources, whose texts are the same. The folder
    is shared and must stay pristine: copy it before patching.

    Raises:
        CppmegaError: `no-wheel`.
    """
    place = place_of(version, distribution)
    if not place.is_dir():
        file = _download(distribution, version, say)
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as scratch:
            unpack(file, Path(scratch) / "tree")
            try:
                (Path(scratch) / "tree").rename(place)
            except OSError:  # another process was faster
                if not place.is_dir():
                    raise
    return place


def place_of(version: str, distribution: str = "megatron-core") -> Path:
    """The folder that `unpacked` returns, whether it exists or not."""
    of = "" if distribution == "megatron-core" else f"{_as_in_files(distribution)}-"
    return cache() / "trees" / f"{of}{version}"


def unpack(file: Path, where: Path) -> None:
    """Unpack a wheel, or the packages in an archive of sources, into a folder.

    Raises:
        CppmegaError: `no-wheel`, if the file is neither.
    """
    try:
        if file.suffix == ".gz":
            _unpack_sources(file, where)
            return
        with zipfile.ZipFile(file) as archive:
            archive.extractall(where)
    except (zipfile.BadZipFile, tarfile.TarError, FileNotFoundError) as error:
        raise CppmegaError(
            "no-wheel",
            f"{file} is not a wheel: {error}.",
            "There is nothing to compare with.",
            "pass a version, a .whl file or a folder that holds megatron/",
        ) from None


def _unpack_sources(file: Path, where: Path) -> None:
    with tempfile.TemporaryDirectory(dir=where.parent) as scratch:
        with tarfile.open(file) as archive:
            archive.extractall(scratch, filter="data")
        (top,) = Path(scratch).iterdir()
        where.mkdir()
        for folder in PACKAGES.values():
            if (top / folder).is_dir():
                shutil.move(top / folder, where / folder)


def _download(distribution: str, version: str, say: Callable[[str], None]) -> Path:
    place = cache() / "wheels"
    place.mkdir(parents=True, exist_ok=True)
    known = _known(place, distribution, version)
    if known is not None:
        return known
    say(f"downloading {distribution} {version}")
    errors = []
    for options in _CHOICES:
        command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps"]
        # In a private folder: pip copies files into place, and others could read an incomplete one.
        with tempfile.TemporaryDirectory(dir=place) as scratch:
            command += [*options, "--dest", scratch, f"{distribution}=={version}"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            known = _known(Path(scratch), distribution, version)
            if known is not None:
                return known.replace(place / known.name)
        errors += [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    raise CppmegaError(
        "no-wheel",
        f"pip found no wheel of {distribution} {version}. " + " ".join(errors[-1:]),
        "Its texts cannot be compared.",
        f"pip index versions {distribution}",
    )


def _known(place: Path, distribution: str, version: str) -> Path | None:
    """A file of a version that was downloaded before, preferably a wheel."""
    name = f"{_as_in_files(distribution)}-{version}"
    return next((file for end in ("-*.whl", ".tar.gz") for file in place.glob(name + end)), None)


def _as_in_files(distribution: str) -> str:
    return re.sub(r"[-.]+", "_", distribution)
