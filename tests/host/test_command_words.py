"""The words of a command line are read as argparse reads them, whatever its options are."""

from __future__ import annotations

import argparse
import contextlib
import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cppmega.host import command_words
from cppmega.host.command_words import Option

PARSER = argparse.ArgumentParser(allow_abbrev=False)
PARSER.add_argument("--rate", nargs=1)
PARSER.add_argument("--list", nargs="+")
PARSER.add_argument("--maybe", nargs="?", const="const")
PARSER.add_argument("--any", nargs="*")
PARSER.add_argument("--pair", nargs=2)
PARSER.add_argument("--switch", action="store_true")
PARSER.add_argument("--bool", action=argparse.BooleanOptionalAction)
NAMES = [name for action in PARSER._actions for name in action.option_strings if name[:3] != "-h"]
VALUES = ["1", "-2", "-3.5", "-.5", "1e-4", "", "a", "a b", "-", "x=y", "-a -b", "([0]*3+[1]*2)"]
WORDS = [*NAMES, *VALUES, "--rate=4", "--list=-5", "--maybe=", "--rat", "--bool=1", "--any=a=b"]


def parsed(words: list[str]) -> dict[str, Any] | None:
    """What argparse finds, without the defaults; None: it refuses the line."""
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
        return {
            name: v for name, v in vars(PARSER.parse_args(words)).items() if v not in (None, False)
        }
    return None


def expected(words: list[str]) -> dict[str, Any]:
    """The same from our reading: of an option that recurs, the last one counts."""
    found: dict[str, Any] = {}
    for option in command_words.read(words):
        name = option.name.removeprefix("--")
        if name in ("switch", "bool", "no-bool"):
            assert not option.values
            found[name.removeprefix("no-")] = name != "no-bool"
        elif name == "maybe":
            found[name] = option.values[0] if option.values else "const"
        else:
            found[name] = list(option.values)
    return {name: value for name, value in found.items() if value is not False}


@given(st.lists(st.sampled_from(WORDS), max_size=12))
def test_a_line_that_argparse_accepts_is_read_the_same(words: list[str]) -> None:
    found = parsed(words)
    if found is not None:
        assert expected(words) == found


@given(st.lists(st.one_of(st.sampled_from([*WORDS, "--"]), st.text(max_size=4)), max_size=12))
def test_no_word_is_lost(words: list[str]) -> None:
    read = command_words.read(words)
    assert [word for option in read for word in option.words] == words
    assert all(option.name for option in read[1:])
    before, after = command_words.split(words)
    assert "--" not in before
    assert [*before, *(["--", *after] if "--" in words else [])] == words


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("a --b", [Option("", ("a",), ("a",)), Option("--b", (), ("--b",))]),
        ("--lr -1e-5", [Option("--lr", ("-1e-5",), ("--lr", "-1e-5"))]),
        ("--lr=1 2", [Option("--lr", ("1", "2"), ("--lr=1", "2"))]),
        ("--a -- --b", [Option("--a", (), ("--a",)), Option("--", ("--b",), ("--", "--b"))]),
    ],
)
def test_words_that_a_parser_may_refuse(line: str, options: list[Option]) -> None:
    assert command_words.read(line.split()) == options
