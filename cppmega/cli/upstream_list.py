"""The ledger of upstream as a table: `cppmega list --upstream`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from cppmega.authoring.upstream import STATES, Reference, Row, State
from cppmega.host import table
from cppmega.host.console import Style

_STYLES: dict[State, Style] = {"released": "good", "merged": "note", "unstated": "waiting"}
_NVIDIA = "NVIDIA/Megatron-LM"


def lines(rows: Iterable[Row]) -> Iterator[str]:
    """Two lines for each page: what upstream has, and when the page can be removed."""
    return table.table(cells for row in rows for cells in _of(row))


def _of(row: Row) -> Iterator[table.Row]:
    named = "; ".join(map(_named, row.references)) or row.upstream.removeprefix("Not sent: ")
    yield table.Row((row.state, row.name, _needed(row), named), _STYLES.get(row.state))
    yield table.Row(("", f"  remove {row.remove}"))


def _named(reference: Reference) -> str:
    place = "" if reference.repository == _NVIDIA else reference.repository
    return f"{place}#{reference.number}" + (f" ({reference.note})" if reference.note else "")


def _needed(row: Row) -> str:
    """The newest release that needs the page; branches are pinned by their names."""
    package = "" if row.distribution == "megatron-core" else f"{row.distribution} "
    releases = [version for version in row.needed_in if version[0].isdigit()]
    return f"up to {package}{releases[-1]}" if releases else "not in a release"


def closing(rows: Sequence[Row]) -> str:
    """Count the pages by state."""
    counts = Counter(row.state for row in rows)
    stated = (f"{counts[state]} {state}" for state in STATES if counts[state])
    return (
        f"{', '.join(stated)}. This is what the pages say; "
        "cppmega drift OLD NEW --prove proves which of them a new release retires"
    )
