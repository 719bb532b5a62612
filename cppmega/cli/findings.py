"""How the findings of a preflight are printed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cppmega.host.console import Style, styled
from cppmega.preflight.findings import Finding


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
    styles: dict[str, Style] = {"ok": "good", "failed": "bad", "not-run": "waiting"}
    return styled(f"{state:<15}", styles.get(state))
