"""Preflight of the data: each check broken, and each healthy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cppmega.data import corpus
from cppmega.data import reading as data_reading
from cppmega.data.corpus import with_suffix
from cppmega.data.structure import COLUMN, DEFINITION
from cppmega.errors import CppmegaError
from cppmega.overlay.verbs import Session
from cppmega.preflight import context as check
from cppmega.preflight.context import Context
from cppmega.recipe import Structure
from cppmega.recipe.run_options import RunOptions
from cppmega.rules import starts
from cppmega.training import plan
from tests.preflight.contexts import SLICE, SMOKE, holds, launch, parsed, refuses, says_nothing
from tests.preflight.datasets import dataset, on, with_structure
from tests.support import patched
from tests.support.datasets import write

pytestmark = pytest.mark.slow


def test_data(tmp_path: Path) -> None:
    assert "20000 tokens" in holds("data", on(dataset(tmp_path / "good")))
    assert holds("data", on(None, "--mock-data")) == "mock data"
    refuses("data", "no-data", on(None))
    refuses("data", "data-not-found", on(tmp_path / "gone"))
    refuses("data", "data-too-small", on(dataset(tmp_path / "small", tokens=100)))
    other = dataset(tmp_path / "other", vocab_size=100_000)
    refuses("data", "vocabulary-too-small", on(other))
    says_nothing("data", launch(root=patched("0.19.2")))


def test_data_that_is_not_what_its_card_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = dataset(tmp_path / "data")
    file = with_suffix(prefix, ".bin")
    data = bytearray(file.read_bytes())
    data[1000] ^= 1
    file.write_bytes(data)
    refuses("data", "data-changed", on(prefix))
    data[1000] ^= 1
    file.write_bytes(data)
    monkeypatch.setattr(data_reading, "_LEARN", 0.0)
    monkeypatch.setattr(check, "_SECONDS", 1e-6)
    left = holds("data", on(prefix))
    assert "NOT READ COMPLETELY" in left and f"python -m cppmega.check_data {prefix}" in left
    assert "NOT READ COMPLETELY" in capsys.readouterr().err
    assert "read completely in" in holds("data", on(prefix, deep=True))
    assert "by an earlier launch" in holds("data", on(prefix))


def test_an_id_in_the_middle_and_a_type_too_narrow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "_LOOK", 100)
    prefix = dataset(tmp_path / "data")
    ids = np.fromfile(with_suffix(prefix, ".bin"), np.uint16)
    ids[10_000] = 300  # a row of the model's embedding, and no id of the tokenizer
    ids.tofile(with_suffix(prefix, ".bin"))
    with_suffix(prefix, ".json").unlink()
    asked = on(prefix, "--tokenizer", "byte")
    assert "token 300 at position 10000" in refuses("data", "token-out-of-vocabulary", asked).what
    wide = dataset(tmp_path / "wide", vocab_size=100_000)
    recipe = SLICE.with_(vocab_size=100_000)
    refuses("data", "data-type-too-narrow", on(wide, recipe=recipe))


def test_several_datasets_are_each_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "_LOOK", 100)
    good, bad = dataset(tmp_path / "good"), tmp_path / "bad"
    ids = np.arange(20_000) % 257
    write(bad, np.where(np.arange(20_000) == 9_000, 60_000, ids), [20_000])
    both = on(good, "--data", str(bad), "--tokenizer", "byte")
    assert "bad.bin" in refuses("data", "token-out-of-vocabulary", both).what
    write(bad, ids, [10_000, 10_000], pointers=[0, 10_000])
    assert "bad.idx" in refuses("data", "data-broken", both).what


def test_a_recipe_with_structure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = SLICE.with_(structure=Structure())
    good = with_structure(tmp_path / "good")
    assert "read completely in" in holds("data", on(good, recipe=recipe))
    assert "by an earlier launch" in holds("data", on(good, recipe=recipe))
    holds("data", on(good))  # a recipe without structure takes the same data
    without = on(dataset(tmp_path / "without"), recipe=recipe)
    assert "--structure" in refuses("data", "structure-missing", without).next
    older = on(with_structure(tmp_path / "older", definition=DEFINITION + 1), recipe=recipe)
    assert "definition" in refuses("data", "structure-differs", older).what
    other = on(with_structure(tmp_path / "other", tokenizer="0" * 64), recipe=recipe)
    assert "another tokenizer" in refuses("data", "data-broken", other).what
    # Of several datasets, each.
    both = on(good, "--data", str(tmp_path / "without"), recipe=recipe)
    assert "without" in refuses("data", "structure-missing", both).what
    tokenizers = pytest.importorskip("tokenizers")
    named = tmp_path / "tokenizer.json"
    words = tokenizers.models.WordLevel({"<unk>": 0, "<end>": 1}, "<unk>")
    tokenizers.Tokenizer(words).save(str(named))
    asked = on(good, "--tokenizer", str(named), "--eod", "<end>", recipe=recipe)
    refuses("data", "tokenizer-differs", asked)

    wide = recipe.with_(structure=Structure(categories=10))
    for context in (on(good, recipe=wide), on(None, "--mock-data", recipe=wide)):
        assert "10 categories" in refuses("data", "structure-differs", context).what
    assert holds("data", on(None, "--mock-data", recipe=recipe)) == "mock data"

    codes = with_suffix(good, f"{COLUMN}.bin")
    np.roll(np.fromfile(codes, np.uint8), 1).tofile(codes)
    refuses("data", "data-changed", on(good, recipe=recipe))
    # The trainer asks the same before it imports torch; it has its own word on what is complete.
    monkeypatch.setitem(starts.ABOUT, "completeness", ())
    options = RunOptions(data=(str(tmp_path / "without"),))
    with pytest.raises(CppmegaError, match="structure-missing"):
        plan.check_files(recipe, options, Session(patched("0.19.2")))


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ({"data_path": ["30", "good", "70", "bad"]}, True),
        ({"data_path": ["bad"]}, True),
        ({"data_path": ["good", "bad"]}, True),
        ({"data_path": ["0.5", "good", "0.5", "bad"], "vocab_size": 70_000}, False),
        ({"data_path": ["good", "s3://bucket/bad"]}, False),
        ({"train_data_path": ["good"], "valid_data_path": ["1", "bad"]}, True),
        ({"data_args_path": "list.txt"}, True),
        ({"per_split_data_args_path": "list.json"}, True),
        ({"data_path": ["good"]}, False),
    ],
)
def test_the_data_of_a_whole_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: dict[str, Any], refused: bool
) -> None:
    """Weights are no prefixes, and every way in which Megatron takes a list is one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(corpus, "_LOOK", 100)
    ids = np.arange(20_000) % 257
    write(Path("good"), ids, [20_000])
    write(Path("bad"), np.where(np.arange(20_000) == 9_000, 60_000, ids), [20_000])
    Path("list.txt").write_text("1 good\n2 bad\n")
    Path("list.json").write_text('{"train": ["1", "good"], "valid": "bad", "test": null}')
    context = launch(None, "--lr", "1", root=patched("0.19.2"))
    context.__dict__["process"] = parsed({"vocab_size": 50_000, **words})
    if refused:
        refuses("line_data", "token-out-of-vocabulary", context)
    else:
        assert "read completely" in holds("line_data", context)


def test_a_whole_line_without_a_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    context = launch(None, "--lr", "1", root=patched("0.19.2"))

    def naming(**args: Any) -> Context:
        context.__dict__["process"] = parsed(args)
        return context

    write(Path("one"), [1, -2, 3], [3], dtype="int32")
    refuses("line_data", "token-out-of-vocabulary", naming(data_path=["one"]))
    refuses("line_data", "data-not-found", naming(data_path=["gone"]))
    refuses("line_data", "data-list-broken", naming(data_args_path="gone"))
    says_nothing("line_data", naming(mock_data=True))
    says_nothing("line_data", naming(data_path=["one"], sft=True))
    says_nothing("line_data", naming(data_path=["gone"], dataloader_type="external"))
    says_nothing("line_data", on(None, "--mock-data"))


def test_the_corpus_of_a_loop(tmp_path: Path) -> None:
    says_nothing("data", launch(SMOKE, "--data", str(tmp_path / "data")))
    dataset(tmp_path / "own")
    # Somebody's dataset, which the loop would not read.
    refuses("data", "not-supported", launch(SMOKE, "--data", str(tmp_path / "own")))
