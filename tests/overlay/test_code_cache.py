"""What applies know of code outlives them, and is believed only if it is one's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cppmega.host import compiled
from cppmega.overlay import code_cache
from cppmega.rewriting import code_text
from tests.support.lab import Lab


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    lab = Lab(tmp_path, monkeypatch)
    lab.wheel()
    lab.page()
    return lab


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of each file whose code is read and parsed."""
    sizes: list[int] = []
    read = code_text._read

    def counting(data: bytes) -> code_text.Code:
        sizes.append(len(data))
        return read(data)

    monkeypatch.setattr(code_text, "_read", counting)
    return sizes


def afresh(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> str:
    """Apply to a tree without a receipt, knowing what a new process knows; the digest."""
    lab.revert()
    monkeypatch.setattr(code_text, "_known", {})
    monkeypatch.setattr(code_text, "_used", set())
    monkeypatch.setattr(compiled, "_known", {})
    monkeypatch.setattr(compiled, "_fresh", {})
    outcome = lab.apply()
    assert outcome.ok and outcome.changed
    return outcome.digest


def test_a_fresh_tree_is_patched_without_parsing_what_is_known(
    lab: Lab, parsed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = afresh(lab, monkeypatch)
    assert parsed
    parsed.clear()
    assert afresh(lab, monkeypatch) == first
    assert parsed == []
    lab.page(what="something else", code="LIMIT = 2\n")
    assert afresh(lab, monkeypatch) == first
    assert len(set(parsed)) == 1


def test_pages_are_compiled_once_and_again_when_their_text_changes(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    afresh(lab, monkeypatch)
    assert compiled._fresh
    afresh(lab, monkeypatch)
    assert compiled._known and not compiled._fresh
    lab.page(edit='replacing("x + x", "3 * x")')
    afresh(lab, monkeypatch)
    assert len(compiled._fresh) == 1
    assert lab.value("double(2)") == 6


def torn(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:100])


def of_others(file: Path) -> None:
    file.chmod(0o666)


def of_another_shape(file: Path) -> None:
    file.write_text("[]")


@pytest.mark.parametrize("spoil", [torn, of_others, of_another_shape])
def test_what_cannot_be_believed_is_made_again(
    spoil: Callable[[Path], None], lab: Lab, parsed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = afresh(lab, monkeypatch)
    before, pages = len(parsed), len(compiled._fresh)
    for file in cached(lab):
        spoil(file)
    assert afresh(lab, monkeypatch) == first
    assert len(parsed) == 2 * before
    assert len(compiled._fresh) == pages


def test_facts_by_other_rules_are_made_again(
    lab: Lab, parsed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    afresh(lab, monkeypatch)
    before = len(parsed)
    (facts,) = (file for file in cached(lab) if file.suffix == ".json")
    facts.write_text(json.dumps(json.loads(facts.read_bytes()) | {"rules": "0" * 16}))
    afresh(lab, monkeypatch)
    assert len(parsed) == 2 * before


def cached(lab: Lab) -> list[Path]:
    files = sorted((lab.root.parent / "cache").iterdir())
    assert len(files) == 2
    return files


def test_without_a_cache_folder_an_apply_works(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(code_cache, "_folder", lambda: tmp_path / "file" / "below")
    assert afresh(lab, monkeypatch)
