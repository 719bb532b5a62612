"""Text in columns."""

from __future__ import annotations

import pytest

from cppmega.host.table import Row, table


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    rows = [Row(("ok", "a", "first")), Row(("failed", "longer", "second"))]
    assert list(table(rows)) == ["ok      a       first", "failed  longer  second"]


def test_a_column_has_its_minimum_width_and_its_alignment() -> None:
    assert list(table([Row(("a", "1", "end"))], widths=(4, 3), right={1})) == ["a       1  end"]


def test_further_lines_of_the_last_cell_are_indented_to_its_column() -> None:
    assert list(table([Row(("a", "one\ntwo"))])) == ["a  one\n   two"]


def test_a_row_may_have_fewer_cells_and_empty_ones() -> None:
    rows = [Row(("name", "column", "detail")), Row(("", "", "below")), Row(("end",))]
    assert list(table(rows)) == ["name  column  detail", "              below", "end"]
    assert list(table([])) == []


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")


def test_sentences_are_wrapped_in_their_column_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a log they stay on one line, and a command can be copied from either."""
    text = "what: a sentence that is longer than it\nnext: a command --that is longer than it"
    rows = [Row(("failed", text))]
    assert list(table(rows)) == [f"failed  {text}".replace("\n", "\n        ")]
    on_a_terminal(monkeypatch, 40)
    (shown,) = table(rows)
    assert shown.splitlines() == [
        "failed  what: a sentence that is longer",
        "              than it",
        "        next: a command --that is longer than it",
    ]


def test_a_narrow_terminal_and_a_long_word_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_terminal(monkeypatch, 35)
    text = "a sentence that is longer than that"
    assert list(table([Row(("failed", text))])) == [f"failed  {text}"]
    on_a_terminal(monkeypatch, 40)
    path = "megatron/core/transformer/multi_token_prediction.py"
    assert next(table([Row(("failed", path)), Row(("", ""))])) == f"failed  {path}"
