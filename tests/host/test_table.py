"""Text in columns."""

from __future__ import annotations

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
