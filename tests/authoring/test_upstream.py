"""The ledger of upstream is what the pages say, and the pages do not contradict themselves."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result
from msgspec import structs

from cppmega.authoring import upstream
from cppmega.catalogue import loader as catalogue
from cppmega.cli.main import cli

LINK = "https://github.com/NVIDIA/Megatron-LM/pull"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"{LINK}/1 (in 0.19.0)", [(1, "released", ("0.19.0",))]),
        (f"{LINK}/1 (0.17.0)", [(1, "released", ("0.17.0",))]),
        (f"{LINK}/1 (in 0.15.3 and 0.16.0)", [(1, "released", ("0.15.3", "0.16.0"))]),
        (f"{LINK}/1 (merged after 0.19.2)", [(1, "merged", ())]),
        (f"{LINK}/1 (dev, August 2026; not released)", [(1, "merged", ())]),
        (f"{LINK}/1 (open) and #2 (closed)", [(1, "open", ()), (2, "closed", ())]),
        (f"{LINK}/1 (0.18, open) and #2 (in 0.18.0).", [(1, "open", ()), (2, "released", ...)]),
        (f"{LINK}/1 and {LINK}/2 (main)", [(1, "unstated", ()), (2, "merged", ())]),
        ("Not sent: #7 is another bug (open)", []),
    ],
)
def test_what_a_page_says_of_its_pull_requests(
    text: str, found: list[tuple[int, str, tuple[str, ...]]]
) -> None:
    rows = [(one.number, one.state, one.releases) for one in upstream.references(text)]
    assert [row[:2] for row in rows] == [row[:2] for row in found]
    assert all(a[2] == b[2] for a, b in zip(rows, found, strict=True) if b[2] is not ...)


def test_a_number_without_a_link_is_of_the_repository_before_it() -> None:
    text = "https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/3 (open) and #4 (open)"
    first, second = upstream.references(text)
    assert first.url == "https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/3"
    assert second.url == "https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/4"


def test_every_link_of_every_page_is_in_the_ledger() -> None:
    pages = catalogue.load()
    rows = upstream.ledger(pages)
    assert sorted(row.name for row in rows) == sorted(pages)
    for row in rows:
        links = row.upstream.count("https://")
        assert links <= len(row.references) and bool(links) == (row.state != "not-sent"), row.name
        assert row.remove and row.needed_in, row.name


def contradictions(rows: list[upstream.Row]) -> list[str]:
    """The pages that edit a release of which they say that it has everything they bring."""
    return [
        row.name
        for row in rows
        if row.state == "released"
        for last in [max(map(numbers, (one.releases[0] for one in row.references)))]
        if any(numbers(version) >= last for version in row.needed_in if version[0].isdigit())
    ]


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3])


def test_no_page_edits_a_release_that_has_its_fix() -> None:
    rows = upstream.ledger(catalogue.load())
    assert contradictions(rows) == []
    (row,) = [row for row in rows if row.name == "dsa_indexer_rope"]
    (reference,) = upstream.references(f"{LINK}/3026 (in 0.18.2)")
    wrong = structs.replace(row, references=(reference,))
    assert contradictions([wrong]) == ["dsa_indexer_rope"]


def listed(*words: str) -> Result:
    done = CliRunner().invoke(cli, ["list", "--upstream", *words])
    assert done.exit_code == 0, done.output
    return done


def test_what_retires_first_is_at_the_top() -> None:
    states = [line.split()[0] for line in listed().stdout.splitlines()[::2]]
    order = upstream.STATES
    assert states == sorted(states, key=order.index) and {"released", "merged"} <= set(states)


def test_the_ledger_as_json_has_every_page() -> None:
    answer = json.loads(listed("--json").stdout)
    assert {row["name"] for row in answer["patches"]} == set(catalogue.load())
    (row,) = [row for row in answer["patches"] if row["name"] == "dsa_indexer_rope"]
    assert row["state"] == "released" and row["needed_in"][-1] == "0.18.2"
    assert row["references"][0]["releases"] == ["0.19.0"]
