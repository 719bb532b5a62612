"""Decisions about features that users may look for under a name that does not exist here.

The table is `not.toml` of the built-in catalogue, data without code. `cppmega explain NAME` and the
refusal of a variable quote its rows, and `upstream_patches/NOT.md` is written from it.
"""

from __future__ import annotations

from functools import cache
from typing import Literal, NamedTuple

import msgspec

from cppmega.catalogue.loader import builtin_folder
from cppmega.errors import CppmegaError

AS_REPORTED = "as reported"
"""The source of a number that someone else reported, without a log."""

Kind = Literal["declined", "replaced", "megatron", "planned"]

VERDICTS: dict[Kind, str] = {
    "declined": "declined",
    "replaced": "here in another form",
    "megatron": "part of Megatron",
    "planned": "not in this release",
}


class Number(NamedTuple):
    """A reported or measured number, in the words of a sentence."""

    text: str
    source: str
    """`as reported`, or a file of `benchmarks/results`."""


class Decision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row: what it is, what was decided and why, and what to use instead."""

    title: str
    decision: Kind
    why: str
    instead: str
    variables: tuple[str, ...] = ()
    """Environment variables that enabled it; setting one is an error."""
    also: tuple[str, ...] = ()
    """Arguments, scripts, functions and pull requests by which users know it."""
    numbers: tuple[Number, ...] = ()
    not_measured: str = ""
    """What has not been measured; empty if nothing was left open."""
    upstream: str = ""
    breaks_runs: str = ""
    """How its variables were observed to break runs; empty if they were not."""

    def sentences(self) -> str:
        """The decision, its reason and the numbers."""
        parts = [f"{self.title}: {VERDICTS[self.decision]}.", self.why]
        parts += [f"{number.text} ({number.source})." for number in self.numbers]
        parts += [f"Not measured: {self.not_measured}."] if self.not_measured else []
        return " ".join(parts)


@cache
def load() -> dict[str, Decision]:
    """The table, by the names of its rows.

    Raises:
        CppmegaError: `bad-catalogue`.
    """
    path = builtin_folder() / "not.toml"
    try:
        return msgspec.toml.decode(path.read_bytes(), type=dict[str, Decision])
    except (OSError, msgspec.DecodeError) as error:
        raise CppmegaError(
            "bad-catalogue",
            f"{path}: {error}",
            "`cppmega explain` and the refusals of variables quote this table.",
            "restore the file, or install cppmega again",
        ) from None


def find(asked: str) -> dict[str, Decision]:
    """The rows that a row's name, a variable, an argument, a script or a number leads to."""
    word = asked.partition("=")[0] if asked.startswith(("--", "CPPMEGA_")) else asked
    return {
        name: row
        for name, row in load().items()
        if word == name or word in row.variables or word in row.also
    }


def of_variable(name: str) -> Decision | None:
    """The row of an environment variable; None if there is none."""
    return next((row for row in load().values() if name in row.variables), None)


def names() -> list[str]:
    """Everything that `find` knows."""
    return [word for name, row in load().items() for word in (name, *row.variables, *row.also)]


def breaking_variables() -> dict[str, str]:
    """The variables known to break runs -> how they did."""
    return {
        variable: row.breaks_runs
        for row in load().values()
        if row.breaks_runs
        for variable in row.variables
    }
