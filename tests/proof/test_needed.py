"""The law `needed`: each page's proof fails on stock, passes patched, fails on a mutant.

And the law of retirement: where a page says upstreamed, the proof passes on stock. On every
supported version, against the real code, all pages of a version in three processes.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cppmega.catalogue import loader as catalogue
from cppmega.overlay.verbs import Session
from cppmega.proof import verify
from tests import forkserver
from tests.support import NEWEST, VERSIONS, copy, laws, pristine
from tests.support.weekly import MAIN, mostly_weekly

pytestmark = pytest.mark.slow


@pytest.mark.megatron
@pytest.mark.parametrize("version", mostly_weekly(laws.SUPPORTED, VERSIONS[-1], MAIN))
def test_every_needed_page_is_proved(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for page in catalogue.load().values():
        if page.patch.gate:
            monkeypatch.setenv(page.patch.gate, "1")
    forkserver.prove_in_forks(monkeypatch)  # `test_laws` compares texts between hash seeds
    session = Session(copy(version, tmp_path / "tree"))
    proved = verify.verify(session)
    wrong = {one.name: one.detail for one in proved if one.proof in ("failed", "stale")}
    assert not wrong
    here = {one.name for one in proved if one.proof == "passed"}
    needs = {name for name, page in session.pages.items() if page.patch.needs == ("cpu",)}
    assert here >= needs & {one.name for one in proved if "patched" in one.runs}
    plan = session.plan(None, os.environ)
    retired = {name for name, v in plan.verdicts.items() if v.state == "upstreamed"}
    assert retired <= here
    slow = {o.name: r.seconds for o in proved for r in o.runs.values() if r.seconds > 20}
    assert not slow


@pytest.mark.parametrize("release", NEWEST)
def test_pages_of_another_package_are_proved(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for gate, value in laws.gates(release).items():
        monkeypatch.setenv(gate, value)
    forkserver.prove_in_forks(monkeypatch)
    session = Session(pristine(release))
    session.pages = {name: laws.pages()[name] for name in laws.pages_of(release)}
    proved = verify.verify(session)
    assert {one.name: one.proof for one in proved} == dict.fromkeys(session.pages, "passed")
