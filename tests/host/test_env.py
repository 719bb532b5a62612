"""The registry of the package's own environment variables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cppmega.host import env
from cppmega.host.paths import PACKAGE

NAMED = re.compile(r"[\"']CPPMEGA_[A-Z0-9_]+[\"']")


def test_every_variable_has_a_name_with_the_prefix_and_a_meaning() -> None:
    for variable in env.VARIABLES:
        assert variable.name.startswith(env.PREFIX) and len(variable.meaning) > 10
    assert len(env.NAMES) == len(env.VARIABLES)


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        (env.CACHE, "/wheels", Path("/wheels")),
        (env.CACHE, "", None),
        (env.RUNS, "/runs", Path("/runs")),
        (env.RUNS, "", Path("runs")),
        (env.ALLOW_WRAPPER, "a:b,,c:d", ("a:b", "c:d")),
        (env.ALLOW_WRAPPER, "", ()),
        (env.LINEAR_CE_KERNEL, "", "auto"),
        (env.LINEAR_CE_UPSTREAM, "arbitrary", "arbitrary"),
        (env.ROOT, "", None),
        (env.OVERLAY, "abc", "abc"),
    ],
)
def test_a_variable_is_parsed(variable: env.Variable[object], text: str, value: object) -> None:
    assert variable.read({variable.name: text}) == value
    if not text:
        assert variable.read({}) == value


def test_a_process_reads_its_own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.RUNS.name, "/elsewhere")
    assert env.RUNS.read() == Path("/elsewhere")


def test_no_other_module_spells_a_name_of_the_registry() -> None:
    spelled = {
        (str(file.relative_to(PACKAGE)), name.strip("\"'"))
        for file in PACKAGE.rglob("*.py")
        for name in NAMED.findall(file.read_text())
    }
    known = {(file, name) for file, name in spelled if name in env.NAMES}
    assert {file for file, _ in known} == {"host/env.py"}
