"""Verdicts on patches, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterable
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
    """Print state, name and detail; failures last, with what several have in common once."""
    shown = list(verdicts)
    rows = [_row(one, one.detail or _of_code(one)) for one in shown if not one.failed]
    failures: dict[tuple[str, str], list[Verdict]] = {}
    for one in shown:
        if one.failed:
            failures.setdefault((one.state, one.detail), []).append(one)
    groups = list(failures.values())
    last = {one.next: group for group in groups for one in group}
    for group in groups:
        rows += [_row(one, one.target) for one in group]
        why = MEANING[group[0].state]
        rows.append(Row(("", "", f"{group[0].detail}: {why}" if group[0].detail else why)))
        remedies = dict.fromkeys(one.next for one in group if one.next)
        rows += [Row(("", "", f"next: {one}")) for one in remedies if last[one] is group]
    show(table(rows, widths=(STATE_WIDTH,)))


def _row(verdict: Verdict, detail: str) -> Row:
    style = "bad" if verdict.failed else _STYLES.get(verdict.state)
    return Row((verdict.state, verdict.name, detail), style)


def _of_code(verdict: Verdict) -> str:
    """The detail of a verdict that has no other."""
    in_code = verdict.state in ("applied", "armed")
    return f"proof {verdict.proof}" if in_code else verdict.target


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
