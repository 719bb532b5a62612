"""How verdicts are printed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cppmega.host.console import Style, styled
from cppmega.overlay.verbs import Outcome
from cppmega.overlay.verdict import FAILURES, MEANING, Verdict

_STYLES: dict[str, Style] = {
    "applied": "good",
    "armed": "good",
    "pending": "waiting",
    "upstreamed": "note",
}


def print_verdicts(verdicts: Iterable[Verdict]) -> None:
    """State, name, detail; failures with what they mean and the command that helps."""
    rows = list(verdicts)
    width = max((len(v.name) for v in rows), default=0)
    for v in rows:
        style = "bad" if v.state in FAILURES else _STYLES.get(v.state)
        state = styled(f"{v.state:<15}", style)
        detail = v.detail or (f"proof {v.proof}" if v.state in ("applied", "armed") else v.target)
        print(f"{state} {v.name:<{width}}  {detail}".rstrip())
        if v.state in FAILURES:
            print(f"{'':<15} {'':<{width}}  {v.target}: {MEANING[v.state]}")
            if v.next:
                print(f"{'':<15} {'':<{width}}  next: {v.next}")


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
