"""Whatever stock can do, patched can do, over every pair of settings; and the law can fail."""

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import Any

import pytest

from cppmega.catalogue import loader as catalogue
from cppmega.overlay import verbs as overlay
from tests.configurations import law, settings
from tests.configurations.law import Excuse, Finding
from tests.configurations.settings import AXES, DEFAULT, Configuration
from tests.configurations.trees import opened, records_of
from tests.support import VERSIONS, copy, made, patched, pristine

VERSION = VERSIONS[-1]


# -- every pair of settings, on the real code -----------------------------------------------------


@pytest.mark.megatron
@pytest.mark.timeout(3600)  # three minutes on two cores of its own
def test_patched_does_what_stock_does() -> None:
    wrong, excused, able = [], set(), 0
    with opened(pristine(VERSION), patched(VERSION)) as (stock, other):
        for setting in [*settings.cover(), *settings.FOUND]:
            records = records_of(setting, stock, other)
            able += "resumed" in records["stock"]["rows"]
            for finding in law.judged(setting, records):
                if finding.kind in law.REGRESSIONS:
                    wrong.append((setting.name, finding))
                if finding.kind == "excused":
                    excused.update(finding.detail.rpartition(": ")[2].split(", "))
    assert not wrong, "\n".join(map(str, wrong))
    # It would hold of models that cannot run, and where no page is ever reached.
    assert able >= 0.8 * len(settings.cover())
    assert excused == {page for excuse in law.EXCUSES for page in excuse.pages}


@pytest.mark.megatron
def test_pages_that_break_something_are_reported(tmp_path: Path) -> None:
    rope = "megatron/core/models/common/embeddings/rope_utils.py:_rotate_half"
    scatter = "megatron/core/tensor_parallel/mappings.py:_reduce_scatter_along_first_dim"
    wrong_numbers = 'replacing("torch.cat((-x2, x1), dim=-1)",'
    wrong_numbers += ' "torch.cat((-x2, x1 * 1.01), dim=-1)")'
    raises = 'inserting("raise ValueError(\'broken\')", before="world_size = group.size()")'
    for name, target, edit in (
        ("wrong_numbers", rope, wrong_numbers),
        ("raises", scatter, raises),
    ):
        source = _source(target)
        made.page(tmp_path / "pages", name, target=target, source=source, edit=edit)
    root = copy(VERSION, tmp_path / "tree")
    outcome = overlay.apply(overlay.Session(root, [tmp_path / "pages"]))
    assert outcome.ok, outcome.plan.failures

    ropes = Configuration(tensor=2, optimizer="float32")
    scatters = Configuration(tensor=2, sequence_parallel=True, position="other")
    neither = Configuration(position="other")
    found = {}
    with opened(pristine(VERSION), root) as (stock, broken):
        for setting in (ropes, scatters, neither):
            found[setting] = law.judged(setting, records_of(setting, stock, broken))
    assert {finding.kind for finding in found[ropes]} == {"differs"}
    assert "excused: no page" in found[ropes][0].detail
    (failed,) = found[scatters]
    assert (failed.kind, failed.stage) == ("fails", "step 1")
    assert failed.detail == "ValueError in mappings.py:_reduce_scatter_along_first_dim: broken"
    assert found[neither] == []


def _source(target: str) -> str:
    path, _, symbol = target.partition(":")
    text = (pristine(VERSION) / path).read_text()
    (node,) = (n for n in ast.walk(ast.parse(text)) if getattr(n, "name", None) == symbol)
    found = ast.get_source_segment(text, node)
    assert found is not None
    return found


# -- the cover ------------------------------------------------------------------------------------


def test_the_cover_has_every_legal_pair() -> None:
    """Computed in the plain way: what some legal configuration has, some chosen one has."""
    wanted: set[settings.Pair] = set()
    for setting in settings.every():  # of 34,560, whose pairs are too many to hold at once
        wanted |= settings.pairs_of(setting)
    chosen = settings.cover()
    assert wanted == set().union(*map(settings.pairs_of, chosen))
    assert not any(settings.illegal(vars_of(setting)) for setting in chosen)
    assert chosen == settings.cover(), "the same every time"
    assert len(chosen) <= 24, "three minutes"


def test_what_is_illegal_is_not_run() -> None:
    pairs = settings.legal_pairs()
    assert (("tensor", 1), ("sequence_parallel", True)) not in pairs
    assert (("tensor", 2), ("sequence_parallel", True)) in pairs
    assert max(setting.ranks for setting in settings.every()) == settings.MOST_RANKS
    everything = math.prod(map(len, AXES.values()))
    assert 0.4 * everything < sum(1 for _ in settings.every()) < everything
    assert set(vars_of(DEFAULT)) == set(AXES)


def vars_of(setting: Configuration) -> dict[str, Any]:
    return {name: getattr(setting, name) for name in AXES}


# -- the law --------------------------------------------------------------------------------------


def row(loss: float = 2.0, gradient: float = 1.0, weights: str = "a") -> dict[str, Any]:
    return {"losses": [loss], "gradient": gradient, "weights": [weights]}


def record(error: str = "", **rows: dict[str, Any]) -> dict[str, Any]:
    named = {name.replace("_", " "): value for name, value in rows.items()}
    said = {"type": "ValueError", "message": error, "place": "f.py:g"} if error else None
    return {"rows": named, "error": said, "seconds": 1.0}


WHOLE = record(step_1=row(), continued=row(3.0), resumed=row(3.0))
LOADED = record(resumed=row(3.0))


def judged(setting: Configuration = DEFAULT, **changed: dict[str, Any]) -> list[tuple[str, str]]:
    records = {
        "stock": WHOLE,
        "patched": WHOLE,
        "stock loads patched": LOADED,
        "patched loads stock": LOADED,
    }
    records |= {name.replace("_", " "): value for name, value in changed.items()}
    return [(finding.kind, finding.stage) for finding in law.judged(setting, records)]


def test_equal_to_the_bit_is_no_finding() -> None:
    assert judged() == []


@pytest.mark.parametrize(
    "other", [row(2.0000001), row(math.nan), row(gradient=1.001), row(weights="b")]
)
def test_any_difference_is_one_where_no_page_says_so(other: dict[str, Any]) -> None:
    patched = record(step_1=other, continued=row(3.0), resumed=row(3.0))
    assert judged(patched=patched) == [("differs", "step 1")]
    stock = record(step_1=other, continued=row(3.0), resumed=row(3.0))
    assert judged(stock=stock) == [("differs", "step 1")]


def test_what_fails_is_named_by_its_first_stage() -> None:
    assert judged(patched=record("no")) == [("fails", "step 1")]
    early = record("no", step_1=row(), continued=row(3.0))
    assert judged(patched=early) == [("fails", "resumed")]
    assert judged(patched_loads_stock=record("no")) == [("fails", "patched loads stock")]
    assert judged(stock_loads_patched=record("no")) == [("fails", "stock loads patched")]
    assert judged(stock=record("no")) == [("only patched", "step 1")]
    failed = record("no")
    assert judged(stock=failed, patched=failed) == [("neither", "after 0 stages")]


def test_a_checkpoint_continues_the_run() -> None:
    lost = record(step_1=row(), continued=row(3.0), resumed=row(3.5))
    assert ("differs", "resumed") in judged(patched=lost)
    assert judged(stock=lost) == [], "stock's is broken, patched is held to its own"
    assert judged(patched_loads_stock=record(resumed=row(4.0))) == [
        ("differs", "patched loads stock")
    ]


def test_an_excuse_has_a_bound_and_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    excuse = Excuse(("p",), lambda c: c.mtp > 0, loss=1e-2, gradient=1e-1, first_loss_is_same=True)
    monkeypatch.setattr(law, "EXCUSES", (excuse,))
    heads = Configuration(mtp=1)

    def patched(**rows: dict[str, Any]) -> dict[str, Any]:
        return WHOLE | {"rows": WHOLE["rows"] | {k.replace("_", " "): v for k, v in rows.items()}}

    small = patched(step_1=row(gradient=1.05))
    assert judged(heads, patched=small) == [("excused", "step 1")]
    assert judged(DEFAULT, patched=small) == [("differs", "step 1")]
    assert judged(heads, patched=patched(step_1=row(gradient=1.2))) == [("differs", "step 1")]
    assert judged(heads, patched=patched(step_1=row(2.001))) == [("differs", "step 1")]
    later = patched(continued=row(3.003), resumed=row(3.003))
    assert ("differs", "continued") not in judged(heads, patched=later)
    assert judged(heads, patched=patched(step_1=row(math.nan))) == [("differs", "step 1")]


def test_what_is_known_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    known = law.Known("p", ("stock loads patched",), lambda c: c.model == "hybrid")
    monkeypatch.setattr(law, "KNOWN", (known,))
    hybrid = Configuration(model="hybrid", optimizer="float32")
    failed = record("no")
    assert judged(hybrid, stock_loads_patched=failed) == [("known", "stock loads patched")]
    assert judged(hybrid, patched_loads_stock=failed) == [("fails", "patched loads stock")]
    assert judged(DEFAULT, stock_loads_patched=failed) == [("fails", "stock loads patched")]


def test_only_pages_that_change_results_are_excused() -> None:
    pages = catalogue.load()
    for excuse in law.EXCUSES:
        for name in excuse.pages:
            numerics = pages[name].labels["Numerics"]
            assert not numerics.startswith("none"), name


def test_the_linear_loss_is_compared_with_the_one_that_stock_has() -> None:
    assert law.on_stock(Configuration(loss="linear")).loss == "unfused"
    assert law.on_stock(Configuration(loss="native")).loss == "native"
    assert Finding("fails", "step 1", "").kind in law.REGRESSIONS
