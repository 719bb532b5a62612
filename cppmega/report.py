"""Answers on stdout, progress on stderr; the one place that knows how a verdict is printed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from cppmega.errors import CppmegaError
from cppmega.overlay import Outcome
from cppmega.state import FAILURES, MEANING, Verdict

if TYPE_CHECKING:
    from cppmega.check import Finding

_COLOURS = {"applied": "32", "armed": "32", "pending": "33", "upstreamed": "36"}


def say(message: str) -> None:
    """A line of progress."""
    print(message, file=sys.stderr, flush=True)


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


def print_findings(findings: Iterable[Finding]) -> None:
    """State, check, detail; failures with their name, why they matter and the next command."""
    rows = list(findings)
    width = max((len(row.check) for row in rows), default=0)
    colours = {"ok": "32", "failed": "31", "not-run": "33"}
    for row in rows:
        state = coloured(f"{row.state:<15}", colours.get(row.state, ""))
        print(f"{state} {row.check:<{width}}  {row.name or row.what}".rstrip())
        if row.state == "failed":
            for label, text in (("what", row.what), ("why", row.why), ("next", row.next)):
                below = text.replace("\n", f"\n{'':<{width + 24}}")  # a diff has many lines
                print(f"{'':<15} {'':<{width}}  {label + ':':<5} {below}")


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
