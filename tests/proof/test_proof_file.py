"""Recorded proofs: where they count, until when, and what is not recorded."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from cppmega.catalogue import revision
from cppmega.errors import CppmegaError
from cppmega.host import paths
from cppmega.overlay import verbs as overlay
from cppmega.overlay.verbs import Session
from cppmega.proof import proof_file, verify
from cppmega.rewriting import fingerprint
from tests.proof.proving import THING
from tests.support import made

pytestmark = pytest.mark.slow

_DOUBLE = "def double(x):\n    # upstream forgot to double\n    return x\n"
_NEEDS = 'reached="forward", needs=("made_accelerator",)'


@pytest.fixture
def accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What the page needs: there until the test takes it away."""
    place = tmp_path / "packages"
    place.mkdir()
    (place / "made_accelerator.py").write_text("")
    monkeypatch.syspath_prepend(place)

    def take_away() -> None:
        (place / "made_accelerator.py").unlink()
        importlib.invalidate_caches()

    return take_away


def _record(tmp_path: Path) -> list[Path]:
    written: list[Path] = []
    verify.verify(Session(tmp_path / "root"), record=written)
    return written


def test_a_recorded_proof_counts_elsewhere_until_its_page_changes(
    prove, tmp_path: Path, accelerator
) -> None:
    assert prove(patch=_NEEDS).proof == "passed"
    (path,) = _record(tmp_path)
    assert path == tmp_path / "pages" / proof_file.NAME
    (row,) = json.loads(path.read_text())["proofs"]["double_doubles"]
    assert row["megatron"] == "0.19.2" and row["date"] and row["gpu"] == "no GPU"
    accelerator()
    session = Session(tmp_path / "root")
    (proved,) = verify.verify(session)
    assert proved.proof == "passed" and "proved on no GPU" in proved.detail
    assert overlay.status(session).verdicts[0].proof == "passed"
    made.page(tmp_path / "pages", patch=_NEEDS, more="# a comment")
    (proved,) = verify.verify(Session(tmp_path / "root"))
    assert proved.proof == "passed"
    made.page(tmp_path / "pages", patch=_NEEDS, more="X = 1")
    (proved,) = verify.verify(Session(tmp_path / "root"))
    assert proved.proof == "stale" and "the page changed" in proved.detail


_KERNEL = "import cppmega.ops.pointwise.hadamard  # noqa"


def test_a_recorded_proof_is_stale_when_a_kernel_changes(
    prove, tmp_path: Path, accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is named by the patched text alone."""
    prove(patch=_NEEDS, edit=f'replacing("return x", """{_KERNEL}\nreturn 2 * x""")')
    _record(tmp_path)
    accelerator()
    whole = revision.reached
    monkeypatch.setattr(revision, "reached", lambda names: {**whole(names), "cppmega.k": "1"})
    (proved,) = verify.verify(Session(tmp_path / "root"))
    assert proved.proof == "stale" and "code that it runs" in proved.detail


def test_a_recorded_proof_is_of_one_text_of_megatron(prove, tmp_path: Path, accelerator) -> None:
    source = "def double(x):\n    y = x\n    return x\n"
    page = made.page(tmp_path / "pages", patch=_NEEDS)
    pins = {"0.19.2": fingerprint.of_source(source), "0.18.2": fingerprint.of_source(_DOUBLE)}
    known = str({"0.19.2": pins["0.18.2"]})
    assert known in page.read_text()
    page.write_text(page.read_text().replace(known, str(pins)))
    for name, text in (("one", made.THING), ("root", made.THING.replace(_DOUBLE, source))):
        assert overlay.apply(Session(made.tree(tmp_path / name, {THING: text}))).ok
    verify.verify(Session(tmp_path / "one"), record=[])
    accelerator()
    (proved,) = verify.verify(Session(tmp_path / "one"))
    assert proved.proof == "passed"
    (proved,) = verify.verify(Session(tmp_path / "root"))
    assert proved.proof == "unverified" and "a different text" in proved.detail


def test_what_is_not_proved_is_not_recorded(prove, tmp_path: Path, accelerator) -> None:
    """A failing proof, a tree that drifted, and proofs that any machine makes again."""
    prove(patch=_NEEDS, verify="assert False")
    for name in ("not-recorded", "nothing-to-do", "not-recorded"):
        with pytest.raises(CppmegaError) as caught:
            _record(tmp_path)
        assert caught.value.name == name
        made.page(tmp_path / "pages")
        if name == "nothing-to-do":
            made.page(tmp_path / "pages", patch=_NEEDS)
            overlay.apply(Session(tmp_path / "root"))
            thing = tmp_path / "root" / THING
            thing.write_text(thing.read_text() + "\n\ndef more():\n    pass\n")
            made.page(tmp_path / "pages", "drifted", source="def f(x):\n    return 3\n")
    assert not (tmp_path / "pages" / proof_file.NAME).exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 9}', '{"schema": 1, "proofs": {"a": 1}}'])
def test_a_torn_record_is_named(prove, tmp_path: Path, text: str) -> None:
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / proof_file.NAME).write_text(text)
    with pytest.raises(CppmegaError, match="proofs-unreadable"):
        prove(patch='reached="forward", needs=("no_such_accelerator",)')


def test_a_record_in_an_installed_package_is_read_and_written(
    prove, tmp_path: Path, accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a wheel the catalogue lies below the package; the file is found there as in a checkout."""
    inside = tmp_path / "site" / "cppmega" / "upstream_patches"
    made.page(inside, patch=_NEEDS)
    monkeypatch.undo()
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setattr(paths, "PACKAGE", inside.parent)
    root = made.tree(tmp_path / "root")
    assert overlay.apply(Session(root)).ok
    assert _record(tmp_path) == [inside / proof_file.NAME]
    accelerator()
    (proved,) = verify.verify(Session(root))
    assert proved.proof == "passed"
