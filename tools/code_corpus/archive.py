"""The corpus as one compressed archive, for hosts without network.

It holds every document as `PART/PROJECT/PATH`, the licenses of the projects as
`licenses/PROJECT/PATH`, and `manifest.json` at its end. The same list of projects gives the same
bytes with the same version of liblzma, and the same content with any.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

import msgspec

from cppmega.data.sources import left_out
from cppmega.errors import CppmegaError
from tools.code_corpus import selection
from tools.code_corpus.listing import Source

MANIFEST = "manifest.json"
_LICENSE = re.compile(r"(licen[cs]es?|copying|notice|copyright|unlicense)\b.*", re.IGNORECASE)
_LONGEST_LICENSE = 1 << 20

Advance = Callable[[int], None]
Count = dict[str, int]


class Project(msgspec.Struct, kw_only=True):
    """A project, and the part of it that is in the archive."""

    source: Source
    documents: Count = {}
    """Language -> documents."""
    bytes: Count = {}
    """The same -> their bytes."""
    left_out: Count = {}
    """Reason -> files."""


class Manifest(msgspec.Struct, kw_only=True):
    """The contents of an archive."""

    projects: list[Project]
    content: str
    """SHA-256 over the names and hashes of all files before the manifest."""
    schema: int = 1


def pack(
    sources: Sequence[Source],
    files: Mapping[Source, Path],
    out: Path,
    advance: Advance = lambda took: None,
) -> Manifest:
    """Choose the documents of all projects, and write them.

    Args:
        sources: the projects; of similar documents, the first one is kept.
        files: the archive of each project.
        out: the archive; it exists only once it is complete.
        advance: called with the bytes of the projects' archives read.
    """
    new = out.with_name(f"{out.name}.new")
    out.parent.mkdir(parents=True, exist_ok=True)
    manifest, digest, seen = Manifest(projects=[], content=""), hashlib.sha256(), selection.Seen()
    with lzma.open(new, "wb", preset=9) as raw, tarfile.open(fileobj=raw, mode="w|") as archive:
        for source in sources:
            project = Project(source=source)
            for name, text in _chosen(project, files[source], seen):
                _write(archive, name, text)
                digest.update(_line(name, text))
            manifest.projects.append(project)
            advance(files[source].stat().st_size)
        manifest.content = digest.hexdigest()
        _write(archive, MANIFEST, json.dumps(msgspec.to_builtins(manifest), indent=1).encode())
    new.replace(out)
    return manifest


def _chosen(project: Project, archive: Path, seen: selection.Seen) -> Iterator[tuple[str, bytes]]:
    """Name in the archive and text of every document and license of a project; counts them."""
    source, counted = project.source, Counter[str]()
    for path, text in sorted(_files(archive)):
        if _LICENSE.fullmatch(path.name):
            if len(text) <= _LONGEST_LICENSE:
                yield f"licenses/{source.name}-{source.version}/{path}", text
            continue
        language = selection.language(path)
        if language is None:
            continue
        if any(fnmatch(str(path), pattern) for pattern in source.leave_out):
            problem = "left out by the list"
        else:
            problem = selection.problem(text) or seen.problem(text, source.part)
        if problem:
            counted[problem] += 1
            continue
        project.documents[language] = project.documents.get(language, 0) + 1
        project.bytes[language] = project.bytes.get(language, 0) + len(text)
        yield f"{source.folder}/{path}", text
    project.left_out = dict(sorted(counted.items()))


def _files(archive: Path) -> Iterator[tuple[PurePosixPath, bytes]]:
    """The sources and licenses in the archive of a project, by their paths below its top folder."""
    with tarfile.open(archive) as opened:
        for member in opened:
            path = PurePosixPath(*PurePosixPath(member.name).parts[1:])
            if not member.isfile() or not member.name.isprintable():
                continue
            if any(map(left_out, path.parts)):
                continue
            wanted = _LICENSE.fullmatch(path.name) or selection.language(path)
            if wanted and (file := opened.extractfile(member)) is not None:
                yield path, file.read()


def _write(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)  # without a time or an owner
    entry.size = len(data)
    archive.addfile(entry, io.BytesIO(data))


def _line(name: str, text: bytes) -> bytes:
    return f"{hashlib.sha256(text).hexdigest()} {name}\n".encode()


def extract(archive: Path, folder: Path, advance: Advance = lambda took: None) -> Manifest:
    """Unpack an archive completely, checking that it is intact and that no document occurs twice.

    Args:
        archive: the file.
        folder: gets its files, without the manifest.
        advance: called with the compressed bytes read.

    Raises:
        CppmegaError: `archive-broken`.
    """
    digest, hashes, at = hashlib.sha256(), set[bytes](), 0
    manifest: Manifest | None = None
    try:
        with archive.open("rb") as raw, tarfile.open(fileobj=raw, mode="r|xz") as opened:
            for member in opened:
                if member.name == MANIFEST:
                    manifest = _read_manifest(opened, member)
                    continue
                opened.extract(member, folder, filter="data")
                text = (folder / member.name).read_bytes()
                digest.update(_line(member.name, text))
                own = hashlib.sha256(text).digest()
                if own in hashes and not member.name.startswith("licenses/"):
                    raise _broken(archive, f"{member.name} has the text of another document")
                hashes.add(own)
                advance(raw.tell() - at)
                at = raw.tell()
    except (EOFError, ValueError, tarfile.TarError, lzma.LZMAError) as error:
        raise _broken(archive, str(error)) from None
    if manifest is None or digest.hexdigest() != manifest.content:
        raise _broken(archive, "its files are not those of a manifest in it")
    return manifest


def _read_manifest(opened: tarfile.TarFile, member: tarfile.TarInfo) -> Manifest:
    file = opened.extractfile(member)
    return msgspec.json.decode(file.read() if file is not None else b"", type=Manifest)


def _broken(archive: Path, problem: str) -> CppmegaError:
    return CppmegaError(
        "archive-broken",
        f"{archive} cannot be used: {problem}",
        "A corpus with a part missing looks like a complete one.",
        "copy it again; or move it away, and run the same command where pip reaches a package "
        "index",
    )
