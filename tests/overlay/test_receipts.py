"""Receipts of other schemas, and the reasons that are given where something is not applied."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import click
import pytest

from cppmega.cli.group import carrying
from cppmega.errors import CppmegaError
from cppmega.overlay import receipt, transaction
from cppmega.overlay import verbs as overlay
from tests.support.git import commit_all, run_git
from tests.support.lab import FILES, A, B, Lab

OTHER = ("other", f"{B}:single", 'replacing("return x", "return 1 * x")')


@pytest.fixture
def applied(lab: Lab) -> Lab:
    """Two pages, applied."""
    lab.wheel()
    lab.page()
    lab.page(*OTHER)
    assert lab.apply().ok
    return lab


def rewrite(lab: Lab, **changes: Any) -> None:
    path = lab.root / ".cppmega" / "receipt.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | changes))


def as_before(lab: Lab) -> None:
    """The receipt as cppmega wrote it when the digest left the kernels out."""
    raw = json.loads((lab.root / ".cppmega" / "receipt.json").read_bytes())
    for page in raw["pages"].values():
        del page["text"], page["reached"]
    for file in raw["files"].values():
        del file["inserted"], file["runs"]
    del raw["only"], raw["code"]
    raw |= {"schema": 1, "engine": "0123456789ab", "digest": "0" * 16}
    (lab.root / ".cppmega" / "receipt.json").write_text(json.dumps(raw))


# -- an earlier cppmega's --------------------------------------------------------------------------


def test_an_earlier_receipt_is_explained_once_and_a_plain_apply_upgrades_it(applied: Lab) -> None:
    digest = applied.receipt().digest
    as_before(applied)
    outcome = applied.status()
    assert not outcome.ok and [v.detail for v in outcome.verdicts] == ["", ""]
    (note,) = outcome.notes
    assert "earlier cppmega" in note and "kernels" in note and "cppmega apply" in note
    outcome = applied.apply()
    assert outcome.ok and not outcome.changed and outcome.digest == digest
    assert applied.status().ok


@pytest.mark.parametrize("names", [(), ("page",)])
def test_revert_works_with_an_earlier_receipt(applied: Lab, names: tuple[str, ...]) -> None:
    as_before(applied)
    assert applied.revert(*names).changed
    if names:
        applied.applied("other")
        applied.revert()
    applied.pristine()


# -- a newer cppmega's -----------------------------------------------------------------------------


def newer(lab: Lab) -> None:
    raw = json.loads((lab.root / ".cppmega" / "receipt.json").read_bytes())
    for entry in [*raw["pages"].values(), *raw["files"].values()]:
        entry["new_field"] = {"a": 1}
    rewrite(lab, schema=99, tool="9.9", code=[], survey=7, files=raw["files"], pages=raw["pages"])


@pytest.mark.parametrize("names", [(), ("page",)])
def test_a_newer_receipt_gives_the_originals_back(applied: Lab, names: tuple[str, ...]) -> None:
    """Also where our pages would not make the same text: only the receipt knows whose it is."""
    applied.page(edit='replacing("x + x", "3 * x")')
    newer(applied)
    assert "newer cppmega (9.9, schema 99)" in applied.status().notes[0]
    assert applied.revert(*names).changed
    if names:
        applied.applied("other")
        applied.revert()
    applied.pristine()


def test_apply_over_a_newer_receipt_says_so_and_writes_its_own(applied: Lab) -> None:
    applied.page(edit='replacing("x + x", "3 * x")')
    newer(applied)
    assert applied.apply().ok and any("newer cppmega" in line for line in applied.said)
    assert "3 * x" in applied.text() and applied.status().ok
    applied.revert()
    applied.pristine()


def test_a_receipt_that_is_a_folder_is_named(applied: Lab) -> None:
    path = applied.root / ".cppmega" / "receipt.json"
    path.unlink()
    path.mkdir()
    for verb in (applied.status, applied.apply, applied.revert):
        with pytest.raises(CppmegaError) as caught:
            verb()
        assert caught.value.name == "receipt-is-a-folder" and str(path) in caught.value.next


# -- reasons ---------------------------------------------------------------------------------------


def test_only_is_not_taken_out_by_name(applied: Lab) -> None:
    applied.page("third", f"{A}:tail", 'replacing("str(x)", "repr(x)")')
    outcome = applied.apply(only=["page", "third"])
    assert "--only asked for page, third" in outcome.plan.verdicts["other"].detail
    assert applied.status().plan.verdicts["other"].detail == outcome.plan.verdicts["other"].detail
    applied.revert("third")
    assert "removed by name" in applied.verdict("third").detail
    assert "--only" in applied.verdict("other").detail
    assert "reverted" in applied.revert().plan.verdicts["page"].detail


def test_patched_text_that_was_committed(lab: Lab) -> None:
    lab.export()
    commit_all(lab.root)
    lab.page()
    assert lab.apply().ok
    run_git(lab.root, "commit", "-qam", "oops")
    verdict = lab.refused()
    assert verdict.state == "drifted" and "was committed" in verdict.detail
    assert "git" in verdict.next and "revert" in verdict.next
    with pytest.raises(CppmegaError) as caught:
        lab.revert()
    assert "was committed" in caught.value.what and caught.value.name != "original-missing"
    run_git(lab.root, "revert", "--no-edit", "HEAD")
    assert lab.apply().ok


def test_a_plan_made_while_another_process_writes_is_made_again(
    applied: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process has replaced files and not yet the receipt: not foreign, but half done."""
    tree = applied.session().read_tree()
    patched = (applied.root / B).read_bytes()
    begun, planned = threading.Event(), threading.Event()

    def writes() -> None:
        with transaction.locked(tree, lambda _: None):
            (applied.root / B).write_bytes(patched + b"# half\n")
            begun.set()
            planned.wait(20)
            (applied.root / B).write_bytes(patched)

    whole = overlay.planning.make

    def seen(*args: Any, **kwargs: Any) -> Any:
        try:
            return whole(*args, **kwargs)
        finally:
            planned.set()

    monkeypatch.setattr(overlay.planning, "make", seen)
    thread = threading.Thread(target=writes)
    thread.start()
    assert begun.wait(20)
    outcome = overlay.revert(applied.session(), ["page"])
    thread.join()
    assert outcome.ok and applied.text() == FILES[A].decode()


def test_two_reverts_by_name_take_both_out(applied: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one decides by the receipt that it finds under the lock."""
    whole = transaction.locked
    others = [applied.session()]

    def overtaken(*args: Any) -> Any:
        if others:
            overlay.revert(others.pop(), ["page"])
        return whole(*args)

    monkeypatch.setattr(transaction, "locked", overtaken)
    overlay.revert(applied.session(), ["other"])
    monkeypatch.undo()
    assert receipt.load(applied.session().read_tree()).receipt.excluded == ["other", "page"]
    assert applied.text() == FILES[A].decode()


# -- the next command ------------------------------------------------------------------------------


@pytest.mark.slow
def test_next_commands_carry_the_catalogues(lab: Lab, tmp_path: Path) -> None:
    """Without them `cppmega explain NAME` knows no such page, and apply takes it out."""
    lab.wheel()
    mine = tmp_path / "my pages"
    lab.page("mine", pins={"1.0": "0" * 16}, folder=mine)
    for command in (["status"], ["apply"], ["revert", "no_such_page"]):
        done = lab.run(*command, "--patches", str(mine), "--json")
        answer = json.loads(done.stdout)
        said = [answer["error"]["next"]] if "error" in answer else []
        said += [row["next"] for row in answer["patches"] if row["next"]]
        assert said and all(f"--patches '{mine}'" in line for line in said), (command, said)
    assert (
        f"next: cppmega list --patches '{mine}'"
        in lab.run("explain", "minee", "--patches", str(mine)).stderr
    )


@pytest.mark.parametrize(
    ("text", "carried"),
    [
        ("cppmega explain x", "cppmega explain --patches D x"),
        ("run `python -m cppmega.apply_patches` again", "run `python -m cppmega.apply_patches "),
        ("cppmega verify --patches E", "cppmega verify --patches E"),
        ("git checkout cppmega statuses", "git checkout cppmega statuses"),
    ],
)
def test_where_the_option_goes(text: str, carried: str) -> None:
    assert carrying(text, [Path("D")]).startswith(carried)
    assert carrying(text, []) == text


def test_next_commands_are_about_the_tree_that_was_given() -> None:
    with click.Context(click.Command("status"), info_name="status") as context:
        context.params = {"root": Path("R")}
        assert carrying("cppmega status; cppmega list", []) == (
            "cppmega status --megatron R; cppmega list"
        )
        assert carrying("cppmega verify x", [Path("D")]) == (
            "cppmega verify --patches D --megatron R x"
        )
        assert carrying("cppmega diff --megatron S", []) == "cppmega diff --megatron S"
