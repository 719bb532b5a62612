"""What a page is to its user, and the subject that it is filed under."""

from __future__ import annotations

from pathlib import Path

import pytest

from cppmega.catalogue import loader
from cppmega.errors import CppmegaError
from cppmega.overlay import verbs as overlay
from cppmega.page import PURPOSES
from cppmega.proof.stand_ins import Arguments
from cppmega.recipe import index
from tests.support import VERSIONS, copy, laws

PLAIN = Arguments(cppmega_variables={}, rotary_percent=1.0, qk_pos_emb_head_dim=64)
"""A run that asks for nothing."""
ASKED = {
    *("embedding_gradient_rows", "expert_gelu_kernel", "moe_chunks_unsorted"),
    *("router_gating_backward", "te_plain_layers"),
}
"""Pages of kind speed that do not compute stock's bits."""


@pytest.mark.parametrize("name", laws.names())
def test_only_runs_that_ask_for_a_feature_get_it(name: str) -> None:
    page = laws.pages()[name]
    if page.patch.purpose == "feature" and page.patch.gate is None:
        assert page.patch.when is not None and page.patch.when(PLAIN) is False


def test_pages_are_filed_by_subject() -> None:
    pages, home = laws.pages(), loader.builtin_folder()
    folders = {path.name for path in home.iterdir() if path.is_dir() and path.name[0] not in "._"}
    assert folders == loader.subjects(home).keys() == {page.subject for page in pages.values()}
    assert {n for n, page in pages.items() if page.only_where_asked} == ASKED


def test_a_subject_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / loader.SUBJECTS).write_text('mtp = "Multi-token prediction"\n')
    with pytest.raises(CppmegaError, match="there is no folder mtp") as raised:
        loader.load([tmp_path])
    assert raised.value.name == "bad-catalogue"


def states(outcome: overlay.Outcome) -> dict[str, str]:
    return {verdict.name: verdict.state for verdict in outcome.verdicts}


def test_kinds_of_a_tree(tmp_path: Path) -> None:
    root = copy(VERSIONS[-1], tmp_path / "site")
    session = overlay.Session(root, ())
    default = states(overlay.apply(session, environment={}))
    assert {default[name] for name in ASKED} == {"off"}
    off = {n for n, p in session.pages.items() if p.patch.gate is not None}
    assert {n for n, state in default.items() if state == "off"} == ASKED | off
    for kind in PURPOSES:
        found = states(overlay.apply(session, kinds=[kind], environment={}))
        others = {n for n, p in session.pages.items() if p.patch.purpose != kind}
        assert {n for n, state in found.items() if state == "off"} == others | off
    status = {v.name: v.detail for v in overlay.status(overlay.Session(root, ())).verdicts}
    assert "--kind asked for feature" in status["log_second_line"]
    everything = states(overlay.apply(session, kinds=PURPOSES, environment={}))
    assert {n for n, state in everything.items() if state == "off"} == off
    asked = overlay.apply(session, asked=index.load("nam56r_h200_1gpu").patches, environment={})
    assert states(asked) == everything
    assert states(overlay.apply(session, environment={})) == default
