"""The list of projects: the shipped one, and what is no list."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cppmega.errors import CppmegaError
from tools.code_corpus import listing

PERMISSIVE = {"Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "MIT", "MIT-0", "Unlicense"}
ENTRY = """
[[source]]
name = "{name}"
version = "1.0"
license = "MIT"
sha256 = "{hash}"
part = "{part}"
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "sources.toml"
    path.write_text(text)
    return path


def entry(name: str, part: str, digest: str = "0" * 64) -> str:
    return ENTRY.format(name=name, part=part, hash=digest)


def test_every_shipped_project_is_under_a_permissive_license() -> None:
    sources = listing.load()
    for source in sources:
        assert set(re.split(r" AND | OR ", source.license)) <= PERMISSIVE, source.name
    assert len({source.sha256 for source in sources}) == len(sources) > 20


def test_those_for_training_come_first(tmp_path: Path) -> None:
    path = written(tmp_path, entry("h", "heldout") + entry("z", "train") + entry("a", "train"))
    assert [source.name for source in listing.load(path)] == ["z", "a", "h"]
    assert listing.load(path)[0].folder == "train/z-1.0"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (entry("a", "train") + entry("a", "heldout"), "a more than once"),
        (entry("a", "train"), "no project for heldout"),
        (entry("a", "both"), "Invalid enum value 'both'"),
        (entry("a", "train", "0"), "matching regex"),
        (entry("../a", "train"), "matching regex"),
        (entry("a", "train") + "url = 'x'\n", "unknown field"),
        ("[[source", "list of projects"),
    ],
)
def test_what_is_no_list(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(CppmegaError, match=problem) as caught:
        listing.load(written(tmp_path, text))
    assert caught.value.name == "data-list-broken"
    with pytest.raises(CppmegaError, match="data-list-broken"):
        listing.load(tmp_path / "none.toml")
