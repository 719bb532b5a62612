"""Trees that earlier commits applied: known, reverted, and upgraded by this version.

`data/applied_at_COMMIT.json` holds a small tree with its receipt and its pages, as the commit left
them: 430962d wrote schema 1, c6d160f the first receipts of schema 2.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cppmega.overlay import receipt, transaction
from cppmega.tree.installed import Tree, sha256
from tests.support.lab import A, B, Lab
from tests.support.made import write

DATA = Path(__file__).parent / "data"
COMMITS = ("430962d", "c6d160f")


@pytest.fixture(params=COMMITS)
def earlier(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """The tree as an earlier commit left it."""
    lab = Lab(tmp_path, monkeypatch)
    kept = json.loads((DATA / f"applied_at_{request.param}.json").read_bytes())
    write(lab.root, {path: text.encode() for path, text in kept["site"].items()})
    write(lab.pages, {path: text.encode() for path, text in kept["pages"].items()})
    return lab


def test_its_files_and_pages_are_known(earlier: Lab) -> None:
    loaded = receipt.load(Tree(earlier.root))
    assert loaded.exists and set(loaded.receipt.files) == {A, B}
    assert set(loaded.receipt.pages) == {"page", "other"}
    prints = loaded.receipt.pages["page"].targets[f"{A}:double"]
    assert (prints.before, prints.after) == ("9404b654a1d5e173", "fe1d99cb867883de")
    states = {verdict.state for verdict in earlier.status().verdicts}
    assert states <= {"applied", "pending"}


@pytest.mark.parametrize("names", [(), ("page",)])
def test_revert_restores_upstream(earlier: Lab, names: tuple[str, ...]) -> None:
    assert earlier.revert(*names).changed
    if names:
        earlier.applied("other")
        earlier.revert()
    earlier.pristine()


def test_apply_upgrades_the_receipt_and_leaves_the_files(earlier: Lab) -> None:
    before = earlier.text(A), earlier.text(B)
    outcome = earlier.apply()
    assert outcome.ok and not outcome.changed and outcome.receipt_changed
    assert (earlier.text(A), earlier.text(B)) == before
    earlier.applied("page", "other")
    earlier.revert()
    earlier.pristine()


def test_a_hand_edit_since_is_still_foreign(earlier: Lab) -> None:
    earlier.change(A, b"LIMIT = 1", b"LIMIT = 2")
    assert earlier.refused().state == "foreign"


def test_its_journal_is_finished(earlier: Lab) -> None:
    """A kill left the files written, no receipt, and the journal as it was written then."""
    files = receipt.load(Tree(earlier.root)).receipt.files
    rows = {path: [[entry.before, entry.after]] for path, entry in files.items()}
    place = earlier.root / receipt.FOLDER
    (place / "receipt.json").unlink()
    (place / "journal.json").write_text(json.dumps({"files": rows}))
    (place / transaction.UNFINISHED).touch()
    assert earlier.apply().ok
    assert not (place / "journal.json").exists()
    assert receipt.load(Tree(earlier.root)).receipt.files[A].after == sha256(
        earlier.text(A).encode()
    )
    earlier.revert()
    earlier.pristine()
