"""Verdicts on patches, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from cppmega.host.console import Style
from cppmega.host.table import Row, show, table
from cppmega.overlay.verbs import Outcome
from cppmega.overlay.verdict import MEANING, Verdict

_STYLES: dict[str, Style] = {
    "applied": "good",
    "armed": "good",
    "pending": "waiting",
    "upstreamed": "note",
    "unported": "waiting",
}
STATE_WIDTH = 14
"""Wide enough for the usual states, so that successive tables are aligned."""


def print_verdicts(verdicts: Iterable[Verdict]) -> None:
    """Print state, name and detail; for a failure also its meaning and the next command."""
    shown = list(verdicts)
    last = {verdict.next: verdict.name for verdict in shown if verdict.failed}
    rows = [row for verdict in shown for row in _rows(verdict, last)]
    show(table(rows, widths=(STATE_WIDTH,)))


def _rows(verdict: Verdict, last: Mapping[str, str]) -> Iterator[Row]:
    """Lay out a verdict; a command for several failures follows the last of them."""
    in_code = verdict.state in ("applied", "armed")
    detail = verdict.detail or (f"proof {verdict.proof}" if in_code else verdict.target)
    style = "bad" if verdict.failed else _STYLES.get(verdict.state)
    yield Row((verdict.state, verdict.name, detail), style)
    if verdict.failed:
        yield Row(("", "", f"{verdict.target}: {MEANING[verdict.state]}"))
        if verdict.next and last[verdict.next] == verdict.name:
            yield Row(("", "", f"next: {verdict.next}"))


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
