"""What differs between two runs, and between the overlays of runs and of checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import UNSET, structs

from cppmega.overlay import record as overlay_record
from cppmega.overlay.receipt import Receipt
from cppmega.runs import compare, listing
from cppmega.runs.metrics import LoggedStep
from tests.runs.made import make, record


def test_accepted_edits_belong_to_the_name_of_the_code() -> None:
    path, receipt = "megatron/core/x.py", Receipt(digest="aaaa", megatron="0.19.2")
    plain, edited = (overlay_record.record_of(receipt, edits) for edits in ({}, {path: "1" * 64}))
    again = overlay_record.record_of(receipt, {path: "2" * 64})
    assert plain.digest == "aaaa" and edited.digest.startswith("aaaa+edits:")
    assert edited.digest != again.digest and edited.edits == {path: "1" * 64}
    assert overlay_record.differences(plain, edited) == [
        f"accepted edit of {path}: none -> {'1' * 12}"
    ]


def test_allowed_fallbacks_belong_to_the_name_of_the_code(tmp_path: Path) -> None:
    receipt, pages = Receipt(digest="aaaa", megatron="0.19.2"), ("some_kernels", "other_kernels")
    plain, allowed = (overlay_record.record_of(receipt, {}, names) for names in ((), pages))
    assert allowed.digest == "aaaa+fallback:other_kernels,some_kernels"
    assert overlay_record.parse(overlay_record.dump(allowed)) == allowed
    assert overlay_record.differences(plain, allowed) == [
        "fallback allowed: other_kernels",
        "fallback allowed: some_kernels",
    ]
    rows = [listing.row_of(make(tmp_path, "one", 1, overlay=allowed))]
    assert "declined calls allowed: other_kernels, some_kernels" in "\n".join(listing.table(rows))
    assert rows[0].fallbacks == ("other_kernels", "some_kernels")


def test_what_differs_between_two_overlays() -> None:
    then = record("aaaa", {"CPPMEGA_X": "0"}, one=("1", "t"), two=("1", "t"), three=("1", "t"))
    now = record("bbbb", {"CPPMEGA_X": "1"}, two=("2", "u"), three=("1", "u"), four=("1", "t"))
    assert overlay_record.differences(then, now) == [
        "patch added: four",
        "patch removed: one",
        "patch changed: three (same page on another text of Megatron)",
        "patch changed: two (revision 1 -> 2)",
        "gate CPPMEGA_X: 0 -> 1",
    ]
    assert overlay_record.differences(then, then) == []
    older = structs.replace(then, digest="cccc", megatron="0.18.2")
    assert overlay_record.differences(older, then) == ["megatron-core 0.18.2 -> 0.19.2"]


def test_a_changed_kernel_is_named() -> None:
    then = structs.replace(record("aaaa"), code={"cppmega.ops.k": "1"})
    now = structs.replace(record("bbbb"), code={"cppmega.ops.k": "2", "cppmega.new": "1"})
    assert overlay_record.differences(then, now) == ["code changed: cppmega.ops.k"]


def test_a_record_of_an_earlier_kind_is_compared_as_far_as_it_goes() -> None:
    """Runs and checkpoints made when the digest left the kernels out: one sentence says it."""
    then = structs.replace(record("aaaa", one=("1", "t"), two=("1", "t")), code=UNSET)
    same, other = record("bbbb", one=("2", "t"), two=("2", "t")), record("bbbb", one=("2", "u"))
    (said,) = overlay_record.differences(then, same)
    assert "earlier cppmega" in said and "kernels" in said
    assert overlay_record.differences(then, other)[1:] == [
        "patch removed: two",
        "patch changed: one (same page on another text of Megatron)",
    ]


def test_what_a_checkpoint_says_of_its_overlay() -> None:
    then, now = record("aaaa", one=("1", "t")), record("bbbb")
    kept = overlay_record.parse(overlay_record.dump(then))
    assert kept == then
    line = overlay_record.remark_on_checkpoint(kept, now)
    assert "saved under overlay aaaa, this run has bbbb: patch removed: one" in line
    assert overlay_record.remark_on_checkpoint(kept, then) == ""
    for odd in (None, "", "[]", "{}", "{"):
        assert overlay_record.parse(odd) is None
    assert "does not record" in overlay_record.remark_on_checkpoint(None, now)
    assert overlay_record.record_of(Receipt()).digest == overlay_record.NONE


def test_megatron_tells_the_overlay_of_a_checkpoint_that_it_loads(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cppmega.training.pretrain import comparing_overlays

    seen: list[Any] = []
    check = comparing_overlays(lambda saved, **more: seen.append((saved, more)), record("bbbb"))
    saved = SimpleNamespace(cppmega_patches=overlay_record.dump(record("aaaa", one=("1", "t"))))
    check(saved, skip_args={"x"})
    assert "patch removed: one" in capsys.readouterr().out
    assert seen == [(saved, {"skip_args": {"x"}})]  # Megatron's own check goes on
    monkeypatch.setenv("CPPMEGA_DSA_DENSE_LOSS_STEPS", "3")
    check(SimpleNamespace(**vars(saved), cppmega_dsa_dense_loss_steps=2))
    assert "first 2 steps, this run has it in the first 3" in capsys.readouterr().out
    check(SimpleNamespace(**vars(saved), cppmega_dsa_dense_loss_steps=3))
    assert "dense loss" not in capsys.readouterr().out


def test_two_runs_side_by_side(tmp_path: Path) -> None:
    argv = ["--lr", "1", "--flag", "--save", "here", "--hybrid-layer-pattern=-E"]
    one = make(tmp_path, "one", 1, arguments=argv)
    two = make(
        tmp_path,
        "two",
        2,
        arguments=["--lr", "2", "--save", "there", "--hybrid-layer-pattern=-E", "--new", "a", "b"],
        overlay=record("bbbb"),
        stack={"torch": "2.12.0", "triton": "3.6.0"},
        environment={},
        data={"paths": ["e"], "fingerprint": "g", "mock": True},
        recipe={"name": "smoke_cpu", "sha256": "abd", "changes": ["lr=2"]},
        nproc=4,
    )
    for run, offset in ((one, 0), (two, 2)):
        rows = [
            {"step": s, "loss": 5 - s / 100, "seconds": 1.0, "tokens_per_second": 100.0 + offset}
            for s in range(1 + offset, 41 + offset)
        ]
        header = {"start": "smoke_cpu", "data": {"one": "f", "two": "h"}[run.name]}
        run.metrics.write_text("".join(json.dumps(row) + "\n" for row in [header, *rows]) + '{"st')
        assert run.last_step() == LoggedStep(**rows[-1])
    found = compare.compare(one, two)
    assert found.overlay == ["patch removed: one"]
    assert found.arguments == [
        "--flag: given | not given",
        "--lr: 1 | 2",
        "--new: not given | a b",
        "nproc: 2 | 4",
    ]
    assert found.stack == ["torch: 2.11.0 | 2.12.0", "triton: not there | 3.6.0"]
    assert found.environment == ["NCCL_DEBUG: INFO | not there"]
    assert found.data[:2] == ["mock data: False | True", "fingerprint: f | h"]  # the ranks' own
    text, changes = found.recipe
    assert text == "text of the recipe file: abc | abd"
    assert changes == "changed with --set: nothing | lr=2"
    assert (found.common_steps, found.largest_loss_difference) == (38, 0)
    assert found.tokens_per_second == (100, 102)
    text = "\n".join(compare.lines(found))
    assert "bitwise equal" in text and "(+2.0 %)" in text and "MOCK DATA" in text
    shown = [int(x.split()[0]) for x in text.splitlines() if x.strip()[:1].isdigit()]
    assert shown[0] == 1 and shown[-2] == 42 and len(shown) == 21  # twenty, and the verdict
    same = compare.compare(one, one)
    assert not any(
        getattr(same, part) for part in ("overlay", "arguments", "stack", "data", "recipe")
    )


def test_held_out_losses_are_listed_and_compared(tmp_path: Path) -> None:
    runs = []
    for name, loss, data in (("one", 5.0, "f"), ("two", 4.5, "g")):
        run = make(tmp_path, name, 1)
        header = {"start": "smoke_cpu", "data": "d", "held_out": data}
        losses = {"lm loss": loss, "mtp_1 loss": loss + 1}
        rows = [
            {"step": step, "loss": loss, "seconds": 1.0, "tokens_per_second": 1.0}
            for step in range(1, 5)
        ]
        evaluations = [{"evaluated": step, "losses": losses, "tokens": 8} for step in (2, 4)]
        written = [header, *rows, *evaluations[: len(runs) + 1]]
        run.metrics.write_text("".join(json.dumps(row) + "\n" for row in written))
        runs.append(run)
    found = compare.compare(*runs)
    assert [(pair.step, pair.name, pair.loss) for pair in found.held_out] == [
        (2, "lm loss", (5.0, 4.5)),
        (2, "mtp_1 loss", (6.0, 5.5)),
        (4, "lm loss", (None, 4.5)),
        (4, "mtp_1 loss", (None, 5.5)),
    ]
    assert "held-out fingerprint: f | g" in found.data
    shown = [line.split() for line in compare.lines(found)]
    assert ["2", "6.00000", "5.50000", "-5.00e-01", "mtp_1", "loss"] in shown
    row = listing.row_of(runs[1])
    assert row.held_out and row.held_out.evaluated == 4 and row.step == 4
    table = list(listing.table([row]))
    assert table[-1].strip() == "held out after step 4: lm loss 4.5000, mtp_1 loss 5.5000"


def test_losses_that_are_no_numbers_are_a_difference(tmp_path: Path) -> None:
    runs = []
    for name, loss in (("one", 1.0), ("two", float("nan"))):
        run = make(tmp_path, name, 1)
        row = {"step": 1, "loss": loss, "seconds": 1.0, "tokens_per_second": 1.0}
        run.metrics.write_text(json.dumps(row) + "\n")
        runs.append(run)
    assert str(compare.compare(*runs).largest_loss_difference) == "nan"
    assert "equal" not in "\n".join(compare.lines(compare.compare(*runs)))
