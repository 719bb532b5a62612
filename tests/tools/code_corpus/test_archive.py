"""The archive of a corpus: the same bytes each time, all of it or nothing."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from cppmega.errors import CppmegaError
from tests.tools.code_corpus.projects import FILES, all_of_them
from tools.code_corpus import archive as archives

DOCUMENTS = [
    *("heldout/far-1.0/far.py", "train/one-lib-1.0/src/a.py", "train/one-lib-1.0/src/b.c"),
    *("train/two-1.0/b.py", "train/two-1.0/two.hpp"),
]
LICENSES = [f"licenses/{name}" for name in ("far-1.0/LICENSE", "one-lib-1.0/LICENSE")]


@pytest.fixture(scope="module", name="packed")
def a_packed_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    files = all_of_them(folder / "index")
    archives.pack(list(files), files, folder / "code.tar.xz")
    return folder / "code.tar.xz"


def test_it_holds_the_documents_and_the_licenses(packed: Path, tmp_path: Path) -> None:
    read: list[int] = []
    manifest = archives.extract(packed, tmp_path, read.append)
    found = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert found == {*DOCUMENTS, *LICENSES, "licenses/two-1.0/COPYING.txt"}
    assert (tmp_path / "train/one-lib-1.0/src/b.c").read_text() == FILES["one-lib"]["src/b.c"]
    assert sum(read) <= packed.stat().st_size
    one, two, far = manifest.projects
    assert one.documents == {"python": 1, "c": 1}
    assert one.bytes["c"] == len(FILES["one-lib"]["src/b.c"].encode())
    assert one.left_out == {
        "left out by the list": 1,
        "names a license that is not permissive": 1,
        "shorter than 128 bytes": 1,
        "lines of other files": 1,
    }
    assert two.documents == {"python": 1, "cpp": 1}
    assert far.documents == {"python": 1} and far.left_out["the same text"] == 1


def test_the_same_projects_give_the_same_bytes(packed: Path, tmp_path: Path) -> None:
    files = all_of_them(tmp_path / "index")
    took: list[int] = []
    archives.pack(list(files), files, tmp_path / "again.tar.xz", took.append)
    assert (tmp_path / "again.tar.xz").read_bytes() == packed.read_bytes()
    assert sum(took) == sum(path.stat().st_size for path in files.values())


def test_it_is_there_when_it_is_complete(tmp_path: Path) -> None:
    files = all_of_them(tmp_path / "index")
    out = tmp_path / "out" / "code.tar.xz"

    def die(took: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        archives.pack(list(files), files, out, die)
    assert not out.exists()
    assert archives.pack(list(files), files, out).content
    assert [path.name for path in out.parent.iterdir()] == ["code.tar.xz"]


def repacked(packed: Path, out: Path, change: dict[str, bytes | None]) -> Path:
    """The archive with the text of some files changed, or without them."""
    with tarfile.open(packed) as old, tarfile.open(out, "w:xz") as new:
        for member in old:
            file = old.extractfile(member)
            assert file is not None
            text = change.get(member.name, file.read())
            if text is not None:
                member.size = len(text)
                new.addfile(member, io.BytesIO(text))
    return out


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({DOCUMENTS[0]: b"def other(): pass\n"}, "not those of a manifest"),
        ({DOCUMENTS[1]: None}, "not those of a manifest"),
        ({LICENSES[0]: b"Pay.\n"}, "not those of a manifest"),
        ({DOCUMENTS[0]: FILES["two"]["b.py"].encode()}, "has the text of another document"),
        ({"manifest.json": None}, "not those of a manifest"),
        ({"manifest.json": b"{}"}, "missing required field"),
    ],
)
def test_one_that_was_changed(
    packed: Path, tmp_path: Path, change: dict[str, bytes | None], problem: str
) -> None:
    broken = repacked(packed, tmp_path / "broken.tar.xz", change)
    with pytest.raises(CppmegaError, match=problem) as caught:
        archives.extract(broken, tmp_path / "out")
    assert caught.value.name == "archive-broken"


@pytest.mark.parametrize("size", [0, 100, -200])
def test_one_that_was_cut_off(packed: Path, tmp_path: Path, size: int) -> None:
    (tmp_path / "cut").write_bytes(packed.read_bytes()[:size])
    with pytest.raises(CppmegaError, match="archive-broken"):
        archives.extract(tmp_path / "cut", tmp_path / "out")
