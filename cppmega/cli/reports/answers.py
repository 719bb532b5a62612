"""The answers of status, drift, verify and preflight as reports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cppmega.authoring import drift_report, drift_result
from cppmega.cli.group import carrying
from cppmega.cli.reports.entries import Entry, Place, Report, Result
from cppmega.errors import CppmegaError
from cppmega.overlay.plan import Plan
from cppmega.overlay.verbs import Outcome
from cppmega.overlay.verdict import DONE, MEANING, PROOFS, Proof, Verdict
from cppmega.page import Page
from cppmega.rewriting.source import decode, find, parse

if TYPE_CHECKING:
    from cppmega.authoring.drift_result import Drift, PageDrift
    from cppmega.preflight.findings import CheckState, Finding
    from cppmega.proof.verify import Proved

_OF_PROOF: Mapping[Proof, Result] = {
    "passed": "passed",
    "unverified": "skipped",
    "failed": "failed",
    "stale": "failed",
}
_OF_CHECK: Mapping[CheckState, Result] = {
    "ok": "passed",
    "failed": "failed",
    "not-applicable": "skipped",
    "not-run": "skipped",
}
_UNSOUND = "unsound"
"""The rule for problems of a tree or its receipt, as opposed to those of one patch."""


def of_error(command: str, error: CppmegaError) -> Report:
    """The report of a command that could not answer."""
    text = f"{error.what}\n{error.why}"
    entry = Entry(name=command, rule=error.name, result="error", message=text, next=error.next)
    return Report(command, (entry,))


def _by_name(meanings: Mapping[Any, str]) -> dict[str, str]:
    return {str(word): meaning for word, meaning in meanings.items()}


# -- status -------------------------------------------------------------------------------------


def of_status(outcome: Outcome, catalogues: Sequence[Path]) -> Report:
    """The states of all patches, and the problems of the tree."""
    blocked = any(verdict.failed for verdict in outcome.verdicts)
    entries = (_of_verdict(verdict, outcome.plan, catalogues) for verdict in outcome.verdicts)
    patches = (_waiting(one) if blocked and one.rule == "pending" else one for one in entries)
    notes = (
        Entry(name="tree", rule=_UNSOUND, result="failed", message=note) for note in outcome.notes
    )
    meanings = {**_by_name(MEANING), _UNSOUND: "the tree or its receipt is not as apply left it"}
    return Report("status", (*patches, *notes), meanings)


def _waiting(entry: Entry) -> Entry:
    """A pending patch while another one fails; only the latter needs attention."""
    why = "apply changes nothing until the patches that fail have been corrected"
    return replace(entry, result="skipped", message=f"{entry.message}; {why}", next="")


def _of_verdict(verdict: Verdict, plan: Plan, catalogues: Sequence[Path]) -> Entry:
    done: Result = "passed" if verdict.state in DONE else "skipped"
    command = verdict.next or (drift_report.APPLY if verdict.state == "pending" else "")
    meaning = MEANING[verdict.state]
    return Entry(
        name=verdict.name,
        rule=verdict.state,
        result="failed" if verdict.blocks else done,
        message=f"{meaning}: {verdict.detail}" if verdict.detail else meaning,
        next=carrying(command, catalogues),
        place=_place(verdict.target, plan, upstream=False) if verdict.blocks else None,
        page=_file_of(plan.pages.get(verdict.name)),
    )


def _file_of(page: Page | None) -> Path | None:
    return Path(page.path).absolute() if page is not None else None


def _place(target: str, plan: Plan, *, upstream: bool) -> Place:
    """Where a symbol is defined; without a line if it is not defined there exactly once.

    Args:
        upstream: in the text before any patch, instead of the file as it is.
    """
    path, _, symbol = target.partition(":")
    data = plan.survey.read(path) if upstream else plan.tree.read(path)
    return Place(plan.tree.root, path, _line(data, path, symbol))


def _line(data: bytes | None, path: str, symbol: str) -> int | None:
    try:
        definitions = find(parse(decode(data or b"", path), path), symbol)
    except CppmegaError:
        return None
    return definitions[0].lineno if len(definitions) == 1 else None


# -- drift --------------------------------------------------------------------------------------


def of_drift(drift: Drift, catalogues: Sequence[Path]) -> Report:
    """What an upgrade does to every patch, at the places of the new tree."""
    entries = tuple(_of_page(page, drift, catalogues) for page in drift.pages)
    return Report("drift", entries, _by_name(drift_result.MEANING))


def _of_page(page: PageDrift, drift: Drift, catalogues: Sequence[Path]) -> Entry:
    sentence, command = drift_report.advice(page, drift)
    todo = "" if sentence == "nothing" else sentence
    return Entry(
        name=page.page.name,
        rule=page.word,
        result=_of_word(page),
        message="\n".join(_message_lines(page, drift)),
        next=carrying(". ".join(filter(None, [todo, command])), catalogues),
        place=_place(_target(page), drift.new.plan, upstream=True),
        page=_file_of(page.page),
    )


def _of_word(page: PageDrift) -> Result:
    if not page.safe:
        return "failed"
    if page.word == "lost-again":
        return "warning"
    if page.word in ("newly-needed", "upstreamed"):
        return "note"
    return "skipped" if page.word in ("not-needed", "not-compared") else "passed"


def _message_lines(page: PageDrift, drift: Drift) -> Iterator[str]:
    yield drift_report.summary(page, drift)
    if not page.safe:
        for target in page.targets:
            yield from map(click.unstyle, drift_report.target_lines(target, page))


def _target(page: PageDrift) -> str:
    """The symbol to inspect in the new tree: where the first one that needs work is now."""
    changed = [target for target in page.targets if target.word not in ("same", "left")]
    if page.safe or not changed:
        return page.new.target
    first = changed[0]
    near = [match.target for match in first.nearest]
    return next(iter((*first.places, *near)), first.target)


# -- verify and preflight -----------------------------------------------------------------------


def of_verify(proved: Iterable[Proved], pages: Mapping[str, Page]) -> Report:
    """The proofs, each with the time of its runs."""
    entries = (
        Entry(
            name=one.name,
            rule=one.proof,
            result=_OF_PROOF[one.proof],
            message=one.detail,
            next="" if one.proof in ("passed", "unverified") else f"cppmega explain {one.name}",
            page=_file_of(pages.get(one.name)),
            seconds=sum(run.seconds for run in one.runs.values()),
        )
        for one in proved
    )
    return Report("verify", tuple(entries), _by_name(PROOFS))


def of_findings(command: str, findings: Iterable[Finding]) -> Report:
    """The checks of a preflight; one with several problems has several entries."""
    entries = (
        Entry(
            name=one.check,
            rule=one.name or one.state,
            result=_OF_CHECK[one.state],
            message="\n".join(filter(None, [one.what, one.why])),
            next=one.next,
        )
        for one in findings
    )
    return Report(command, tuple(entries))
