"""For tests of what `cppmega verify` believes."""

from __future__ import annotations

from pathlib import Path

import pytest

from cppmega.catalogue import loader as catalogue
from cppmega.overlay import verbs as overlay
from cppmega.overlay.verbs import Session
from cppmega.proof import verify
from tests import forkserver
from tests.support import made


@pytest.fixture
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What proofs are forked from: the session's server, or, as for users, an interpreter."""
    which = getattr(request, "param", "the session's")
    if which == "the session's":
        forkserver.prove_in_forks(monkeypatch)
    return which


@pytest.fixture
def prove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str):
    """Make a tree and a catalogue of one page, apply it, prove it."""
    pages = tmp_path / "pages"
    monkeypatch.setattr(catalogue, "builtin_folder", lambda: pages)

    def go(apply: bool = True, files: dict[str, str] | None = None, **page: str) -> verify.Proved:
        root = made.tree(tmp_path / "root", files)
        made.page(pages, **page)
        session = Session(root)
        if apply:
            assert overlay.apply(session).ok
        (proved,) = verify.verify(session)
        return proved

    return go
