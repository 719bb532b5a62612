"""The mark of tests that are too long for every run, and the versions that they are for."""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest
from _pytest.mark import ParameterSet

from tests.support import BRANCHES, VERSIONS

NOW = os.environ.get("TESTS_WEEKLY") == "1"
weekly = pytest.mark.skipif(not NOW, reason="it runs with TESTS_WEEKLY=1, as once a week")
MAIN, DEV = BRANCHES
SELDOM = ("0.15.3", *VERSIONS[1:-1], DEV)
"""Versions on which all pages together are compared in every run, and each one alone weekly."""
FOLDERS = {"guard", "runtime", "training", "upstream_patches"}
"""Of tests whose parameter `version` is a release of Megatron that is imported."""


def of_this_run(versions: Iterable[str]) -> tuple[str, ...]:
    """The versions without those of `SELDOM`, or the last of them, unless the weekly tests run."""
    given = tuple(versions)
    often = given if NOW else tuple(version for version in given if version not in SELDOM)
    return often or given[-1:]


def mark_versions(items: Iterable[pytest.Item]) -> None:
    """Mark tests as weekly that another version of the same parameter `version` has in every run.

    So a page's own tests run on the oldest and the newest release that need it, and its texts are
    compared on all.
    """
    tests: dict[tuple[object, str], list[tuple[str, pytest.Item]]] = {}
    for item in items:
        version = getattr(item, "callspec", None) and item.callspec.params.get("version")
        if isinstance(version, str) and FOLDERS & set(item.path.parts):
            name = item.name.partition("[")[0]
            tests.setdefault((item.path, name), []).append((version, item))
    for found in tests.values():
        often = of_this_run(sorted({version for version, _ in found}))
        for version, item in found:
            if version not in often:
                item.add_marker(weekly)


def mostly_weekly(values: Iterable[str], *often: str) -> list[ParameterSet]:
    """Parameters of a test: some values in every run, and the others once a week."""
    return [pytest.param(value, marks=() if value in often else weekly) for value in values]
