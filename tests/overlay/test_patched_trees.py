"""The world changed over a patched tree: its pages, its packages, its files, its receipt."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cppmega.errors import CppmegaError
from cppmega.overlay import plan
from tests.support.lab import FILES, A, B, Lab
from tests.support.made import dist_info, snapshot

# -- the world changed over a patched tree ---------------------------------------------------------


def test_changed_page_starts_from_upstream_again(lab: Lab) -> None:
    lab.wheel()
    lab.page()
    lab.apply()
    lab.page(edit='replacing("x + x", "x * 2")')
    verdict = lab.verdict()
    assert verdict.state == "pending" and "changed" in verdict.detail
    assert lab.apply().ok
    assert "return x * 2" in lab.text() and "2 * x" not in lab.text()


def test_removed_page_is_taken_out(lab: Lab) -> None:
    lab.wheel()
    lab.page("one").rename(lab.pages / "gone.py")
    lab.page("stays", f"{B}:single", 'replacing("x", "x + 1", times=1)')
    lab.apply()
    (lab.pages / "gone.py").unlink()
    verdict = lab.verdict("gone")
    assert verdict.state == "pending" and not lab.status().ok
    assert lab.apply().ok
    lab.applied("stays")
    assert (lab.root / A).read_bytes() == FILES[A]


def test_another_engine_makes_everything_again(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new release of ours may write another text; and it must not believe old fingerprints."""
    lab.wheel()
    lab.page()
    lab.apply()
    monkeypatch.setattr(plan, "engine_revision", lambda: "other")
    assert lab.verdict().state == "pending" and "another version" in lab.verdict().detail
    path = lab.root / ".cppmega" / "receipt.json"
    raw = json.loads(path.read_bytes())
    raw["survey"] = dict.fromkeys(raw["survey"], "?2")
    path.write_text(json.dumps(raw))
    assert lab.verdict().state == "pending"


def test_reinstall_over_a_patched_tree(lab: Lab) -> None:
    """pip puts upstream's files back: pending, although the receipt says applied."""
    lab.wheel()
    lab.page()
    lab.apply()
    (lab.root / A).write_bytes(FILES[A])
    verdict = lab.verdict()
    assert verdict.state == "pending" and "reinstalled" in verdict.detail
    assert lab.apply().changed == [A]
    lab.applied("page")


def test_upgrade_over_a_patched_tree(lab: Lab, tmp_path: Path) -> None:
    """Another version in the same place: the old receipt speaks of other files, but the team's
    catalogue is not forgotten."""
    lab.wheel("1.0")
    lab.page()
    team = tmp_path / "team"
    lab.page("theirs", f"{B}:single", 'replacing("x", "x + 1", times=1)', folder=team)
    lab.apply(team)
    shutil.rmtree(lab.root / "megatron")
    shutil.rmtree(lab.root / "megatron_core-1.0.dist-info")
    lab.files[A] = FILES[A].replace(b"LIMIT = 1", b"LIMIT = 2")
    lab.wheel("1.1")
    outcome = lab.status()
    assert not outcome.ok and "1.0" in outcome.notes[0]
    assert {v.state for v in outcome.verdicts} == {"pending"}
    assert lab.apply().ok
    lab.applied("page", "theirs")
    lab.revert()
    lab.pristine()


def test_rewritten_record_forgets_nothing(lab: Lab) -> None:
    """Another installer writes RECORD anew, with the same hashes: the patch is still ours."""
    lab.wheel()
    lab.page()
    lab.apply()
    (record,) = lab.root.glob("*.dist-info/RECORD")
    record.write_text(record.read_text() + "megatron_core-1.0.dist-info/INSTALLER,,\n")
    assert "another installation" in lab.status().notes[0]
    assert lab.apply().ok
    lab.applied("page")
    record.write_text(record.read_text() + "megatron_core-1.0.dist-info/REQUESTED,,\n")
    assert lab.revert().ok
    lab.pristine()


def test_upgrade_of_another_package_forgets_nothing(lab: Lab) -> None:
    """`pip install -U liger-kernel` must not make our own patch look like a stranger's."""
    lab.wheel()
    lab.page()
    lab.apply()
    (lab.root / "liger_kernel").mkdir()
    (lab.root / "liger_kernel" / "x.py").write_text("def f(): ...\n")
    dist_info(lab.root, "0.8.0", "liger_kernel")
    lab.applied("page")
    lab.revert()
    assert (lab.root / A).read_bytes() == FILES[A]


def test_edit_of_a_patched_file_is_foreign(lab: Lab) -> None:
    """Somebody edits the file after us: neither apply nor revert may lose that edit."""
    lab.wheel()
    lab.page()
    lab.apply()
    lab.change(A, b"LIMIT = 1", b"LIMIT = 9")
    before = snapshot(lab.root)
    assert lab.refused().state == "foreign"
    with pytest.raises(CppmegaError) as caught:
        lab.revert()
    assert caught.value.name == "foreign-edit"
    assert snapshot(lab.root) == before


def test_edit_of_patched_text_is_drifted(lab: Lab) -> None:
    """Every page of the file says what happened, also one that upstream made needless there."""
    lab.wheel()
    lab.page()
    lab.page("fixed", f"{A}:Layer.forward", pins={"9.9": "0" * 16}, fixed="True")
    lab.apply()
    assert lab.verdict("fixed").state == "upstreamed"
    lab.change(A, b"2 * x", b"4 * x")
    assert lab.refused().state == "drifted"
    for name in ("page", "fixed"):
        assert "edited after cppmega patched it" in lab.verdict(name).detail


# -- the receipt ---------------------------------------------------------------------------------


def _lose(lab: Lab, how: str) -> None:
    path = lab.root / ".cppmega" / "receipt.json"
    if how == "deleted":
        path.unlink()
    elif how == "folder deleted":
        shutil.rmtree(path.parent)
    elif how == "truncated":
        path.write_bytes(path.read_bytes()[:100])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "odd":
        path.write_text('{"schema": 1, "pages": [], "files": {}}')
    else:
        path.write_text('{"schema": 99}')


_LOST = ["deleted", "truncated", "empty", "odd", "schema"]


@pytest.mark.parametrize("how", _LOST)
@pytest.mark.parametrize("verb", ["apply", "revert"])
def test_lost_receipt_is_made_again_from_the_originals(lab: Lab, how: str, verb: str) -> None:
    """RECORD says which kept original is upstream's, and the pages make of it what stands there."""
    lab.wheel()
    lab.page()
    digest = lab.apply().digest
    _lose(lab, how)
    assert not lab.status().ok
    if verb == "apply":
        assert lab.apply().digest == digest
        lab.applied("page")
    assert lab.revert().ok
    lab.pristine()


def test_lost_receipt_over_an_edit_claims_nothing(lab: Lab) -> None:
    lab.wheel()
    lab.page()
    lab.apply()
    lab.change(A, b"2 * x", b"4 * x")
    _lose(lab, "truncated")
    assert lab.refused().state == "drifted"
    with pytest.raises(CppmegaError, match="no-receipt"):
        lab.revert()


def test_a_receipt_that_somebody_wrote_in_is_written_again(lab: Lab) -> None:
    """The preflight refuses it, and names the command that mends it."""
    lab.wheel()
    lab.page()
    digest = lab.apply().digest
    path = lab.root / ".cppmega" / "receipt.json"
    path.write_bytes(path.read_bytes().replace(digest.encode(), b"0" * 16))
    assert not lab.status().ok
    assert lab.apply().digest == digest
    assert lab.status().ok


def test_a_tree_without_a_receipt_has_none_that_was_changed(lab: Lab) -> None:
    lab.wheel()
    lab.page()
    assert not lab.status().notes


@pytest.mark.parametrize(
    ("vouched", "how"), [(True, "folder deleted"), *((False, how) for how in _LOST)]
)
@pytest.mark.parametrize("reached", ["forward", "never"])
def test_lost_receipt_is_never_already_patched(
    lab: Lab, vouched: bool, how: str, reached: str
) -> None:
    """Our text without our receipt, and nobody knows what is upstream's: every verb refuses, even
    though the code looks fixed and even for another page."""
    lab.wheel() if vouched else lab.export()
    lab.page(fixed='"2 * x" in source.file(FILE)', code=f"FILE = {A!r}", reached=reached)
    lab.page("other", f"{B}:single", 'replacing("x", "x + 1", times=1)')
    lab.apply(only=["page"])
    _lose(lab, how)
    assert not lab.status().ok
    verdict = lab.refused(only=["page"])
    assert verdict.state == "drifted" and "receipt" in verdict.detail
    before = snapshot(lab.root)
    for verb in (lambda: lab.apply(only=["other"]), lab.revert):
        with pytest.raises(CppmegaError) as caught:
            verb()
        assert caught.value.name == "no-receipt"
    assert snapshot(lab.root) == before


@pytest.mark.parametrize("how", ["deleted", "truncated", "odd"])
def test_lost_receipt_over_a_pristine_tree(lab: Lab, how: str) -> None:
    """After a reinstall nothing is lost with the receipt: apply simply writes a new one."""
    lab.wheel()
    lab.page()
    lab.apply()
    (lab.root / A).write_bytes(FILES[A])
    _lose(lab, how)
    assert lab.verdict().state == "pending"
    assert lab.apply().ok
    lab.applied("page")
    lab.revert()
    lab.pristine()


def test_receipt_of_another_tree(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copied receipt proves nothing: the files of this tree are not what it says."""
    (tmp_path / "elsewhere").mkdir()
    other = Lab(tmp_path / "elsewhere", monkeypatch)
    other.files[A] = FILES[A].replace(b"LIMIT = 1", b"LIMIT = 2")
    other.wheel("2.0")
    other.page()
    other.apply()
    lab.wheel("1.0")
    lab.pages = other.pages
    shutil.copytree(other.root / ".cppmega", lab.root / ".cppmega")
    outcome = lab.status()
    assert not outcome.ok and outcome.plan.verdicts["page"].state == "pending"
    assert "2.0" in outcome.notes[0]
    assert lab.apply().ok
    lab.applied("page")
    lab.revert()
    lab.pristine()


def test_receipt_of_another_tree_of_the_same_version(lab: Lab) -> None:
    """Same version, same RECORD, but nothing was applied here."""
    lab.wheel()
    lab.page()
    lab.apply()
    lab.root.rename(lab.root.with_name("patched"))
    lab.wheel()
    shutil.copytree(lab.root.with_name("patched") / ".cppmega", lab.root / ".cppmega")
    assert lab.verdict().state == "pending"
    assert lab.apply().changed == [A]
    lab.applied("page")


def test_lost_original_is_said(lab: Lab) -> None:
    """Patched as it should be, but it could not be taken back: that is not `applied`."""
    lab.wheel()
    lab.page()
    lab.apply()
    shutil.rmtree(lab.root / ".cppmega" / "originals")
    verdict = lab.refused()
    assert verdict.state == "foreign" and "original" in verdict.detail
    with pytest.raises(CppmegaError) as caught:
        lab.revert()
    assert caught.value.name == "original-missing"


def test_damaged_original_is_not_put_back(lab: Lab) -> None:
    lab.wheel()
    lab.page()
    lab.apply()
    (kept,) = (lab.root / ".cppmega" / "originals").iterdir()
    kept.write_bytes(kept.read_bytes() + b"# damaged\n")
    before = snapshot(lab.root)
    with pytest.raises(CppmegaError):
        lab.revert()
    assert snapshot(lab.root) == before


def test_only_needed_originals_are_kept(lab: Lab) -> None:
    """What no page edits any more needs no original."""
    lab.wheel()
    lab.page("one")
    lab.page("two", f"{B}:single", 'replacing("x", "x + 1", times=1)')
    lab.apply()
    assert len(list((lab.root / ".cppmega" / "originals").iterdir())) == 2
    lab.revert("two")
    assert len(list((lab.root / ".cppmega" / "originals").iterdir())) == 1


def test_digest_names_the_code_and_nothing_else(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal on every machine with the same code, different as soon as the code differs."""
    lab.wheel()
    lab.page()
    first = lab.apply().digest
    (tmp_path / "elsewhere").mkdir()
    twin = Lab(tmp_path / "elsewhere", monkeypatch)
    twin.wheel()
    twin.page()
    assert twin.apply().digest == first
    twin.page(edit='replacing("x + x", "x * 2")')
    assert twin.apply().digest != first
