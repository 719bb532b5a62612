"""Text in columns."""

from __future__ import annotations

import shlex

import click
import pytest

from cppmega.host.table import Row, fitted, table


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
    text = "what: a sentence that is longer than it\nnext: cppmega command --that 'is longer'"
    rows = [Row(("failed", text))]
    assert list(table(rows)) == [f"failed  {text}".replace("\n", "\n        ")]
    on_a_terminal(monkeypatch, 40)
    (shown,) = table(rows)
    assert shown.splitlines() == [
        "failed  what: a sentence that is longer",
        "              than it",
        "        next: cppmega command --that \\",
        "              'is longer'",
    ]


def test_columns_without_room_are_below_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_terminal(monkeypatch, 24)
    rows = [Row(("NAME", "LOSS", "TOKENS", "OVERLAY")), Row(("a-run", "1.25", "100", "0011"))]
    assert list(table(rows, right={1, 2})) == [
        "NAME   LOSS  TOKENS\n    OVERLAY",
        "a-run  1.25     100\n    0011",
    ]
    empty = [Row(("failed", "name", "x" * 30)), Row(("", "", "a text below the empty cells"))]
    assert list(table(empty))[1] == "    a text below the\n    empty cells"


PATH = "megatron/core/transformer/experimental_attention_variant/" + "x" * 70 + ".py:Name.method"
TEXTS = (
    f"what: it is in {PATH}, and the sentence goes on after it, for longer than any terminal has",
    f"next: cppmega diff --patches {PATH} 'a b' --megatron /somewhere/else --json --and more",
    f"{PATH} alone",
    "left out: its results differ; `python -m cppmega.apply_patches --kind all` applies it again",
)
WIDTHS = (40, 60, 80, 120)


@pytest.mark.parametrize("columns", WIDTHS)
def test_nothing_is_wider_than_the_terminal_or_lost(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    rows = [Row(("STATE", "NAME", "LOSS", "OVERLAY", "TMUX"))]
    rows += [Row(("applied", "a_name_of_a_patch", "1.0", "0" * 16, text)) for text in TEXTS]
    rows += [Row((PATH, "after a long cell", "x")), Row(("failed", "\n".join(TEXTS)))]
    lines = [*TEXTS, *("      " + text for text in TEXTS), "    patches   " + ", ".join("abc" * 60)]
    whole = "\n".join([*table(rows), *lines])
    on_a_terminal(monkeypatch, columns)
    shown = [*table(rows), *map(fitted, lines)]
    assert max(len(line) for text in shown for line in text.splitlines()) <= columns
    without = "\n".join(shown).replace("\\\n", "\n")
    assert "".join(without.split()) == "".join(whole.split())
    monkeypatch.undo()
    assert all(f"{text}\n" in whole for text in TEXTS)


def test_a_wrapped_command_is_the_same_to_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(TEXTS[1].removeprefix("next: "))
    on_a_terminal(monkeypatch, 40)
    for shown in (fitted("  " + TEXTS[1]), *table([Row(("failed", TEXTS[1]))])):
        assert shlex.split(shown.partition("next: ")[2].replace("\\\n", "")) == words


def test_a_wrapped_line_keeps_its_style(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_terminal(monkeypatch, 40)
    word, line = click.style("changed", fg="red", bold=True), "a sentence that is longer than that "
    assert fitted(f"{word}  {line}") == f"{word}  a sentence that is longer than\n         that"
    assert click.unstyle(fitted(click.style(line * 2, fg="red"))) == fitted(line * 2)
