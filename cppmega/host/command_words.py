"""The words of a command line, read as `argparse` reads them, for any options.

Whoever has the parser asks the parser. This is for lines of options that only another process
knows, such as Megatron's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_OPTION = re.compile(r"-(?!\.?\d)[^ =]+(?==|$)")
"""A negative number, a lone dash and a text with a space before its first `=` are values."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option as a command line states it. If it recurs, parsers use the last one."""

    name: str
    """Such as `--lr`; empty for what precedes the first option. Megatron's parser accepts no
    abbreviations, so that the name is complete."""
    values: tuple[str, ...]
    """Empty for a switch. `--a=b` and `--a b` have the same value."""
    words: tuple[str, ...]
    """The option as it is written."""


def read(words: Sequence[str]) -> list[Option]:
    """The options of a line in their order, each with every value up to the next option.

    `--` counts as an option whose values are all that follows it.
    """
    mine, after = split(words)
    options: list[Option] = []
    for word in mine:
        if _OPTION.match(word):
            name, equals, value = word.partition("=")
            options.append(Option(name, (value,) if equals else (), (word,)))
            continue
        last = options.pop() if options else Option("", (), ())
        options.append(Option(last.name, (*last.values, word), (*last.words, word)))
    if len(mine) < len(words):
        options.append(Option("--", after, ("--", *after)))
    return options


def split(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The words before the first `--`, and those after it."""
    at = words.index("--") if "--" in words else len(words)
    return tuple(words[:at]), tuple(words[at + 1 :])
