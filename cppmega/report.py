"""Answers on stdout, progress on stderr; the one place that knows how a verdict is printed."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self, TextIO

from cppmega.errors import CppmegaError
from cppmega.overlay import Outcome
from cppmega.state import FAILURES, MEANING, Verdict

if TYPE_CHECKING:
    from cppmega.findings import Finding

_COLOURS = {"applied": "32", "armed": "32", "pending": "33", "upstreamed": "36"}


def say(message: str) -> None:
    """A line of progress. A reader that is gone ends nothing."""
    _put(f"{message}\n")


def _put(text: str) -> None:
    """Write to stderr; where nobody reads it, nothing is kept for Python to fail on at its end."""
    try:
        print(text, end="", file=sys.stderr, flush=True)
    except OSError:
        _mute(sys.stderr)


def _mute(stream: TextIO) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Progress:
    """Names of what is being done, each before it starts, in one line.

    On a terminal the line changes; elsewhere it grows.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self.terminal = sys.stderr.isatty()
        self.begun = False

    def __call__(self, name: str) -> None:
        """Say what starts now."""
        if self.terminal:
            _put(f"\r\033[K{self.title}: {name}")
        else:
            _put(f" {name}" if self.begun else f"{self.title}: {name}")
        self.begun = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.begun:
            _put("\r\033[K" if self.terminal else "\n")


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Print an answer; a reader that has seen enough (`| head`) does not change the exit status."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _mute(sys.stdout)


def coloured(word: str, code: str, stream: Any = None) -> str:
    """A word in colour, on a terminal only and never against NO_COLOR."""
    stream = stream or sys.stdout
    if not code or os.environ.get("NO_COLOR") or not stream.isatty():
        return word
    return f"\033[{code}m{word}\033[0m"


def print_verdicts(verdicts: Iterable[Verdict]) -> None:
    """State, name, detail; failures with what they mean and the command that helps."""
    rows = list(verdicts)
    width = max((len(v.name) for v in rows), default=0)
    for v in rows:
        code = "31" if v.state in FAILURES else _COLOURS.get(v.state, "")
        state = coloured(f"{v.state:<15}", code)
        detail = v.detail or (f"proof {v.proof}" if v.state in ("applied", "armed") else v.target)
        print(f"{state} {v.name:<{width}}  {detail}".rstrip())
        if v.state in FAILURES:
            print(f"{'':<15} {'':<{width}}  {v.target}: {MEANING[v.state]}")
            if v.next:
                print(f"{'':<15} {'':<{width}}  next: {v.next}")


def print_findings(findings: Iterable[Finding], verbose: bool = False) -> None:
    """What holds in one line, what is to be read, and what fails in full, last.

    Args:
        verbose: a line for every check instead, in their order.
    """
    rows = list(findings)
    if not verbose:
        for line in _in_short(rows):
            print(line)
        rows = [row for row in rows if row.state == "failed" or row.is_remark]
        rows.sort(key=lambda row: row.state == "failed")
    width = max((len(row.check) for row in rows), default=0)
    for row in rows:
        print(f"{_state(row.state)} {row.check:<{width}}  {row.name or row.what}".rstrip())
        if row.state == "failed":
            for label, text in (("what", row.what), ("why", row.why), ("next", row.next)):
                below = text.replace("\n", f"\n{'':<{width + 24}}")  # a diff has many lines
                print(f"{'':<15} {'':<{width}}  {label + ':':<5} {below}")


def _in_short(rows: list[Finding]) -> Iterator[str]:
    names: dict[str, list[str]] = {}
    for row in rows:
        names.setdefault(row.state, []).append(row.check)
    if ok := names.get("ok"):
        yield f"{_state('ok')} {_checks(ok)} {_verb(ok, 'hold')}: {', '.join(ok)}"
    if other := names.get("not-applicable"):
        said = f"{_checks(other)} {_verb(other, 'do' if len(other) > 1 else 'doe')} not concern"
        yield f"{_state('not-applicable')} {said} this launch (-v lists them)"
    if waiting := names.get("not-run"):
        said = f"{_checks(waiting)} {_verb(waiting, 'wait')} for what fails"
        yield f"{_state('not-run')} {said}: {', '.join(waiting)}"


def _checks(names: list[str]) -> str:
    return f"{len(names)} check{'s' if len(names) > 1 else ''}"


def _verb(names: list[str], verb: str) -> str:
    return verb if len(names) > 1 else f"{verb}s"


def _state(state: str) -> str:
    colours = {"ok": "32", "failed": "31", "not-run": "33"}
    return coloured(f"{state:<15}", colours.get(state, ""))


def summary(verdicts: Iterable[Verdict]) -> str:
    """`12 applied, 1 armed, 2 upstreamed`."""
    counts: dict[str, int] = {}
    for verdict in verdicts:
        counts[verdict.state] = counts.get(verdict.state, 0) + 1
    return ", ".join(f"{count} {state}" for state, count in counts.items()) or "no patches"


def as_json(outcome: Outcome, ok: bool) -> dict[str, Any]:
    """The object that `--json` prints."""
    return {
        "schema": 1,
        "megatron": {
            "version": outcome.plan.tree.version,
            "root": str(outcome.plan.tree.root),
        },
        "digest": outcome.digest,
        "ok": ok,
        "changed": outcome.changed,
        "notes": outcome.notes,
        "patches": [verdict.as_json() for verdict in outcome.verdicts],
    }


NOTHING: Mapping[str, Any] = {
    "schema": 1,
    "megatron": None,
    "digest": "",
    "ok": False,
    "changed": [],
    "notes": [],
    "patches": [],
}
"""What every answer of `--json` has, whatever the command knows."""


def error_json(error: CppmegaError) -> dict[str, Any]:
    """The object that `--json` prints when nothing could be answered."""
    return {**NOTHING, "error": error.as_json()}


def print_json(answer: Mapping[str, Any]) -> None:
    """One object on stdout."""
    print(json.dumps(answer, indent=2))
