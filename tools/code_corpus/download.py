"""Source archives, downloaded with pip from the index that pip is configured with.

pip prepares the metadata of what it downloads by calling the build backend of the project, which
would install its requirements and run its code. The archive itself contains its metadata, so
stand-ins for the backends return that, and no code of an archive is run.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from cppmega.errors import CppmegaError
from cppmega.tree import wheels
from tools.code_corpus.listing import Source

_BACKENDS = (
    "setuptools.build_meta",
    "mesonpy",
    "hatchling.build",
    "flit_core.buildapi",
    "poetry.core.masonry.api",
    "scikit_build_core.build",
    "scikit_build_core.setuptools.build_meta",
    "pdm.backend",
)
_STAND_IN = """\
import email, pathlib, sys

def prepare_metadata_for_build_wheel(folder, settings=None):
    metadata = pathlib.Path("PKG-INFO").read_bytes()
    fields = email.message_from_bytes(metadata)
    name = fields["Name"].replace("-", "_").replace(".", "_")
    place = pathlib.Path(folder, f"{name}-{fields['Version']}.dist-info")
    place.mkdir()
    (place / "METADATA").write_bytes(metadata)
    return place.name

__legacy__ = sys.modules[__name__]
"""


def fetched(source: Source, say: Callable[[str], None]) -> Path:
    """The archive of a project, downloaded unless it is in the cache.

    Raises:
        CppmegaError: `input-not-found`.
    """
    place = wheels.cache() / "sources"
    file = place / f"{source.name}-{source.version}"
    if not _has_hash(file, source):
        say(f"downloading {source.name} {source.version}")
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place) as scratch:
            _download(source, Path(scratch)).replace(file)
    return file


def _has_hash(file: Path, source: Source) -> bool:
    """Whether a file is the archive that the list names."""
    try:
        with file.open("rb") as archive:
            return hashlib.file_digest(archive, "sha256").hexdigest() == source.sha256
    except FileNotFoundError:
        return False


def _download(source: Source, scratch: Path) -> Path:
    stand_ins, found = scratch / "stand_ins", scratch / "found"
    for backend in _BACKENDS:
        _write_stand_in(stand_ins, backend)
    wanted = scratch / "wanted.txt"
    wanted.write_text(f"{source.name}=={source.version} --hash=sha256:{source.sha256}\n")
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--no-binary=:all:", "--no-build-isolation", "--use-pep517"]
    command += ["--ignore-requires-python", "--require-hashes", "--dest", str(found)]
    done = subprocess.run(
        [*command, "--requirement", str(wanted)],
        env={**os.environ, "PYTHONPATH": str(stand_ins)},
        capture_output=True,
        text=True,
        check=False,
    )
    files = [path for path in found.glob("*") if _has_hash(path, source)]
    if done.returncode == 0 and files:
        return files[0]
    errors = [line for line in done.stderr.splitlines() if line.strip()]
    raise CppmegaError(
        "input-not-found",
        f"pip did not find {source.name} {source.version} with the listed hash. "
        + " ".join(errors[-1:]),
        "The corpus would lack one of its projects, and be a different one.",
        "run it where pip reaches a package index, and copy the archive that it builds",
    )


def _write_stand_in(folder: Path, backend: str) -> None:
    *packages, module = backend.split(".")
    for package in packages:
        folder /= package
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").touch()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{module}.py").write_text(_STAND_IN)
