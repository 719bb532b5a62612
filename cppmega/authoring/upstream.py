"""The ledger of upstream: the pull requests that pages name, with the state that they give.

A page's `Upstream:` line names pull requests, each with its state in parentheses:

    Upstream: https://github.com/NVIDIA/Megatron-LM/pull/4070 (in 0.19.0)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, get_args

import msgspec

from cppmega.page import Page, left_alone

State = Literal["released", "merged", "open", "closed", "unstated", "not-sent"]
STATES: tuple[State, ...] = get_args(State)
"""Pages that retire first come first."""

_REFERENCE = re.compile(
    r"(?:https://github\.com/(?P<repository>[\w.-]+/[\w.-]+)/(?P<kind>pull|issues)/|#)"
    r"(?P<number>\d+)(?:\s+\((?P<note>[^)]*)\))?"
)
_RELEASES = re.compile(r"(?:^|\bin |\band )(\d+\.\d+\.\d+)")
_WORDS: Mapping[State, re.Pattern[str]] = {
    "open": re.compile(r"\bopen\b"),
    "closed": re.compile(r"\bclosed\b"),
    "merged": re.compile(r"\b(?:merged|main|dev)\b"),
}


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """A pull request or an issue."""

    repository: str
    number: int
    url: str
    state: State
    releases: tuple[str, ...]
    """The first releases that contain it."""
    note: str
    """The state that the page gives in parentheses."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One page, as `cppmega list --upstream --json` prints it."""

    name: str
    state: State
    """Of the reference that is least advanced: the page retires with the last of them."""
    distribution: str
    """The package whose versions the page pins."""
    needed_in: tuple[str, ...]
    """The pinned versions that the page edits, oldest first."""
    references: tuple[Reference, ...]
    upstream: str
    remove: str


def ledger(pages: Mapping[str, Page]) -> list[Row]:
    """One row for each page, those that retire first at the top."""
    rows = [row_of(page) for _, page in sorted(pages.items())]
    return sorted(rows, key=lambda row: STATES.index(row.state))


def row_of(page: Page) -> Row:
    """Read the header of one page."""
    text = page.labels["Upstream"]
    named = tuple(references(text))
    edits = [edit for edit in page.patch.edits if edit.edit is not left_alone]
    return Row(
        name=page.name,
        state=max((one.state for one in named), key=STATES.index, default="not-sent"),
        distribution=page.patch.distributions[0],
        needed_in=tuple(in_order(version for edit in edits for version in edit.pins)),
        references=named,
        upstream=text,
        remove=page.labels["Remove"],
    )


def references(text: str) -> Iterator[Reference]:
    """The pull requests and issues in a page's `Upstream:` line.

    One without a link, such as `#4593`, is in the repository of the link before it.
    """
    repository = ""
    for match in _REFERENCE.finditer("" if text.startswith("Not sent") else text):
        repository = match["repository"] or repository
        if not repository:
            continue
        note = match["note"] or ""
        releases = tuple(_RELEASES.findall(note))
        yield Reference(
            repository=repository,
            number=int(match["number"]),
            url=f"https://github.com/{repository}/{match['kind'] or 'pull'}/{match['number']}",
            state="released" if releases else _state(note),
            releases=releases,
            note=note,
        )


def _state(note: str) -> State:
    stated = (state for state, word in _WORDS.items() if word.search(note))
    return next(stated, "unstated")


def in_order(versions: Iterable[str]) -> list[str]:
    """Sort versions, oldest first, without repetitions."""
    return sorted(set(versions), key=lambda v: [int(n) for n in re.findall(r"\d+", v)[:3]])
