"""The findings of a preflight, as a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cppmega.host.console import Style
from cppmega.host.table import Row, show, table
from cppmega.host.wording import counted
from cppmega.preflight.findings import Finding, merged

_STYLES: dict[str, Style] = {"ok": "good", "failed": "bad", "not-run": "waiting"}
STATE_WIDTH = 14
"""Wide enough for every state, so that the summary and the table below are aligned."""
_OTHER = ("does not concern this launch", "do not concern this launch")
"""The predicate for checks that do not apply, singular and plural."""


def print_findings(
    findings: Iterable[Finding], verbose: bool = False, other: tuple[str, str] = _OTHER
) -> None:
    """Print the checks that hold in one line, then remarks, and failures in full last.

    Args:
        verbose: print a line for every check instead, in their order.
        other: the predicate for checks that do not apply, singular and plural.
    """
    shown = list(findings)
    if not verbose:
        show(table(_summary(shown, other), widths=(STATE_WIDTH,)))
        shown = [
            *(one for one in shown if one.is_remark),
            *merged(one for one in shown if one.state == "failed"),
        ]
    show(table([row for one in shown for row in _rows(one)], widths=(STATE_WIDTH,)))


def _rows(finding: Finding) -> Iterator[Row]:
    title = finding.name or finding.what
    yield Row((finding.state, finding.check, title), _STYLES.get(finding.state))
    if finding.state == "failed":
        for label, text in (("what", finding.what), ("why", finding.why), ("next", finding.next)):
            yield Row(("", "", f"{label + ':':<5} " + text.replace("\n", f"\n{'':<6}")))


def _summary(findings: list[Finding], not_applicable: tuple[str, str]) -> Iterator[Row]:
    names: dict[str, list[str]] = {}
    for one in findings:
        names.setdefault(one.state, []).append(one.check)
    if ok := names.get("ok"):
        verb = "holds" if len(ok) == 1 else "hold"
        yield Row(("ok", f"{counted(len(ok), 'check')} {verb}: {', '.join(ok)}"), _STYLES["ok"])
    if other := names.get("not-applicable"):
        verb = not_applicable[len(other) > 1]
        text = f"{counted(len(other), 'check')} {verb} (-v lists them)"
        yield Row(("not-applicable", text))
    if waiting := names.get("not-run"):
        verb = "waits" if len(waiting) == 1 else "wait"
        text = f"{counted(len(waiting), 'check')} {verb} for those that fail: {', '.join(waiting)}"
        yield Row(("not-run", text), _STYLES["not-run"])
