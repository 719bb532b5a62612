"""Archives of sources by pip: the listed bytes or nothing, and no code of theirs is run."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cppmega.errors import CppmegaError
from tests.tools.code_corpus.projects import FILES, packed, source
from tools.code_corpus import download


@pytest.fixture(name="index")
def own_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What pip is set up with is a folder."""
    monkeypatch.setenv("CPPMEGA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index"


def test_it_is_downloaded_once_and_nothing_of_it_is_run(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = packed(index, "one-lib", FILES["one-lib"], again="Requires-Python: <3\n")
    wanted = source(path, "one-lib", "train")
    said: list[str] = []
    file = download.fetched(wanted, said.append)
    assert file.read_bytes() == path.read_bytes()
    assert said == ["downloading one-lib 1.0"]
    path.unlink()
    assert download.fetched(wanted, said.append) == file and len(said) == 1
    assert [one.name for one in file.parent.iterdir()] == ["one-lib-1.0"]


def test_other_bytes_under_its_name_are_not_taken(index: Path) -> None:
    wanted = source(packed(index, "two", FILES["two"]), "two", "train")
    with pytest.raises(CppmegaError, match="did not find two") as caught:
        download.fetched(msgspec.structs.replace(wanted, sha256="0" * 64), print)
    assert caught.value.name == "input-not-found"
    assert not list(download.wheels.cache().glob("sources/*"))
