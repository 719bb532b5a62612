"""Whatever stock can do, patched can do, over every pair of settings; and the law can fail."""

from __future__ import annotations

import ast
import itertools
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cppmega.catalogue import loader as catalogue
from cppmega.overlay import verbs as overlay
from tests.configurations import law, settings
from tests.configurations.law import Excuse, Finding
from tests.configurations.settings import AXES, DEFAULT, Configuration
from tests.configurations.trees import opened, records_of
from tests.support import VERSIONS, copy, made, patched, pristine, weekly

VERSION = VERSIONS[-1]
RANKS, COVERED = (17, 0.8) if weekly.NOW else (10, 0.7)
"""In the configurations that are run besides `FOUND`, all together; and their part of all pairs."""


# -- every pair of settings, on the real code -----------------------------------------------------


@pytest.mark.megatron
@pytest.mark.timeout(3600)
def test_patched_does_what_stock_does() -> None:
    """Of most pairs, in a minute; `python -m benchmarks.configurations` runs all."""
    wrong, excused, able = [], set(), 0
    chosen = [*settings.first_of_cover(RANKS), *settings.FOUND]
    with opened(pristine(VERSION), patched(VERSION)) as (stock, other):
        for setting in chosen:
            records = records_of(setting, stock, other)
            able += "resumed" in records["stock"]["rows"]
            for finding in law.judged(setting, records):
                if finding.kind in law.REGRESSIONS:
                    wrong.append((setting.name, finding))
                if finding.kind == "excused":
                    excused.update(finding.detail.rpartition(": ")[2].split(", "))
    assert not wrong, "\n".join(map(str, wrong))
    # It would hold of models that cannot run, and where no page is ever reached.
    assert able >= 0.8 * len(chosen)
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
    names = ("wrong_numbers", "raises")
    outcome = overlay.apply(overlay.Session(root, [tmp_path / "pages"]), only=names)
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
    chosen = settings.cover()
    covered = set().union(*map(settings.pairs_of, chosen))
    for pair in itertools.combinations(((a, value) for a in AXES for value in AXES[a]), 2):
        (a, one), (b, other) = pair
        is_legal = a != b and any(
            values.get(a, one) == one and values.get(b, other) == other
            for values in settings.legal()
        )
        assert (pair in covered) == is_legal, pair
    assert not any(settings.illegal(vars(setting)) for setting in chosen)
    part = settings.first_of_cover(RANKS)
    has = set().union(*map(settings.pairs_of, (*part, *settings.FOUND)))
    assert len(has & covered) >= COVERED * len(covered) and set(part) < set(chosen)


def test_what_is_illegal_is_not_run() -> None:
    pairs = settings.legal_pairs()
    assert (("tensor", 1), ("sequence_parallel", True)) not in pairs
    assert (("tensor", 2), ("sequence_parallel", True)) in pairs
    assert set(vars(DEFAULT)) == set(AXES)
    ruled, legal, dice = settings.legal()[0], 0, random.Random(0)
    everything = math.prod(map(len, AXES.values()))
    for _ in range(3000):
        values = {name: dice.choice(options) for name, options in AXES.items()}
        is_legal = {name: values[name] for name in ruled} in settings.legal()
        assert is_legal == (not settings.illegal(values)), values
        legal += is_legal
    assert legal / 3000 == pytest.approx(settings.count() / everything, rel=0.1)
    for setting in itertools.islice(settings.drawn(0), 50):
        assert not settings.illegal(vars(setting)) and setting.ranks <= settings.MOST_RANKS


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


def test_what_stock_gets_wrong_is_compared_with_what_is_right() -> None:
    assert law.on_stock(Configuration(loss="linear")).loss == "unfused"
    assert law.on_stock(Configuration(loss="native")).loss == "native"
    assert law.on_stock(Configuration(loss="native", optimizer="float32")).loss == "unfused"
    packs = Configuration(packing="no total")
    assert law.on_stock(packs) == packs
    assert law.on_stock(replace(packs, model="hybrid")).packing == "packed"
    assert Finding("fails", "step 1", "").kind in law.REGRESSIONS
