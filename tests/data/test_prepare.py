"""Preparing data: right tokens, resumable after a kill at any point, never overwriting."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from cppmega.data import corpus
from cppmega.data import prepare as data
from cppmega.data import tokenizers as tokens
from cppmega.data.sources import files
from cppmega.errors import CppmegaError
from tests.data.killed import killed_at_each_rename
from tests.support import REPOSITORY
from tests.support.datasets import write

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("no_collections"),
]
BYTES = tokens.ByteTokenizer()


@pytest.fixture(scope="module", name="indexed")
def megatron_dataset() -> Any:
    """Megatron's own reader."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import IndexedDataset
    return IndexedDataset


@pytest.fixture(name="sources")
def some_sources(tmp_path: Path) -> Path:
    """A folder of texts, and what must be left out of it."""
    folder = tmp_path / "sources"
    for number in range(40):
        path = folder / f"part{number % 3}" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"document {number}\n" * (1 + number % 5))
    (folder / "part0" / "empty.txt").write_text("  \n")
    (folder / "part0" / "picture.txt").write_bytes(b"\0\1\2")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("never")
    return folder


def prepared(out: Path, sources: Path, **options: Any) -> corpus.Card:
    """Prepare with tiny shards."""
    return data.prepare(out, [sources], BYTES, **{"shard_tokens": 200, **options})


def refused(name: str, *arguments: Any, **options: Any) -> CppmegaError:
    """The named error of a `prepare` call."""
    with pytest.raises(CppmegaError) as caught:
        data.prepare(*arguments, **options)
    assert caught.value.name == name, caught.value.render()
    return caught.value


def test_megatron_reads_back_the_documents_that_were_given(
    tmp_path: Path, sources: Path, indexed: Any
) -> None:
    card = prepared(tmp_path / "out", sources)
    paths = [p for p in files([sources], ()) if p.name not in ("empty.txt", "picture.txt")]
    dataset = indexed(str(tmp_path / "out"))
    assert [bytes(d[:-1].astype("uint8")) for d in dataset] == [p.read_bytes() for p in paths]
    assert all(document[-1] == 256 for document in dataset)
    assert (card.documents, card.skipped) == (40, {"empty": 1, "binary": 1})
    assert card.tokens == sum(len(document) for document in dataset)
    assert card.dtype == "uint16"


def test_shards_do_not_show_in_the_result(tmp_path: Path, sources: Path) -> None:
    many = prepared(tmp_path / "many", sources)
    one = prepared(tmp_path / "one", sources, shard_tokens=1 << 20)
    assert many.fingerprint == one.fingerprint
    assert corpus.digest(tmp_path / "many") == (many.bin_sha256, many.idx_sha256)


@pytest.mark.parametrize("after", [1, 5, 17])
def test_a_run_killed_while_reading_goes_on_and_ends_the_same(
    tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    monkeypatch.setattr(data, "_BATCH", 2)
    whole = prepared(tmp_path / "whole", sources)
    calls = 0

    def die(took: int) -> None:
        nonlocal calls
        calls += 1
        if calls == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepared(tmp_path / "killed", sources, advance=die)
    taken: list[int] = []
    resumed = prepared(tmp_path / "killed", sources, advance=taken.append)
    assert resumed == whole
    assert sum(taken) == sum(path.stat().st_size for path in files([sources], ()))
    assert not (tmp_path / "killed.parts").exists()


def test_a_run_killed_at_any_rename_goes_on_and_ends_the_same(
    tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "_BATCH", 8)
    whole = prepared(tmp_path / "whole", sources)

    def run(point: int) -> corpus.Card:
        return prepared(tmp_path / f"killed{point}", sources)

    def check(point: int) -> None:
        assert run(point) == whole, point

    assert killed_at_each_rename(monkeypatch, run, check) > 10


@pytest.mark.slow
def test_kill_9_in_a_process_of_its_own(tmp_path: Path, sources: Path) -> None:
    code = (
        "import os, sys, pathlib\n"
        "from cppmega.data import prepare as data, tokenizers as tokens\n"
        "data._BATCH = 4\n"
        "out, sources = map(pathlib.Path, sys.argv[1:])\n"
        "seen = []\n"
        "def advance(took):\n"
        "    seen.append(took)\n"
        "    len(seen) == 6 and os.kill(os.getpid(), 9)\n"
        "data.prepare(out, [sources], tokens.ByteTokenizer(), shard_tokens=100, advance=advance)\n"
    )
    out = tmp_path / "killed"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(out), str(sources)], cwd=REPOSITORY
    )
    assert done.returncode == -signal.SIGKILL
    with pytest.raises(CppmegaError, match="data-unfinished"):
        corpus.open_(out)
    assert prepared(out, sources) == prepared(tmp_path / "whole", sources)


def test_a_finished_dataset_is_never_overwritten(tmp_path: Path, sources: Path) -> None:
    before = prepared(tmp_path / "out", sources)
    error = refused("data-exists", tmp_path / "out", [sources], BYTES)
    assert "out.json" in error.what
    assert corpus.digest(tmp_path / "out") == (before.bin_sha256, before.idx_sha256)
    (tmp_path / "out.json").unlink()  # somebody else's dataset is safe too
    refused("data-exists", tmp_path / "out", [sources], BYTES)


def test_a_run_is_not_resumed_with_other_inputs(tmp_path: Path, sources: Path) -> None:
    def die(took: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepared(tmp_path / "out", sources, advance=die)
    (sources / "part0" / "0.txt").write_text("something else altogether")
    refused("inputs-changed", tmp_path / "out", [sources], BYTES)


def test_only_one_process_prepares_a_dataset(tmp_path: Path, sources: Path) -> None:
    def second(took: int) -> None:
        refused("data-in-use", tmp_path / "out", [sources], BYTES)

    prepared(tmp_path / "out", sources, advance=second)


def test_json_lines(tmp_path: Path, indexed: Any) -> None:
    path = tmp_path / "in.jsonl"
    lines = [{"body": "one"}, {"body": "zwei ü"}, {"body": " "}]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    card = data.prepare(tmp_path / "out", [path], BYTES, key="body")
    assert (card.documents, card.skipped) == (2, {"empty": 1})
    dataset = indexed(str(tmp_path / "out"))  # its arrays die with it
    assert bytes(dataset[1][:-1].astype("uint8")).decode() == "zwei ü"
    path.write_text('{"text": "one"}\n{"text": 2}\n')
    assert "line 2" in refused("bad-jsonl", tmp_path / "bad", [path], BYTES).what
    path.write_text('{"other": "one"}\n')
    assert "line 1" in refused("bad-jsonl", tmp_path / "worse", [path], BYTES).what


def test_missing_and_empty_inputs_are_named(tmp_path: Path, sources: Path) -> None:
    refused("input-not-found", tmp_path / "out", [tmp_path / "nowhere"], BYTES)
    refused("no-input", tmp_path / "out", [sources], BYTES, suffixes=[".rs"])
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    refused("no-input", tmp_path / "out", [empty], BYTES)
    refused("no-input", tmp_path / "out", [empty], BYTES)  # again: nothing pretends to be done


@pytest.mark.slow
def test_our_own_sources_make_a_corpus(tmp_path: Path) -> None:
    """Through the script, as a user types it: progress on stderr, the answer on stdout."""
    command = [sys.executable, "-W", "ignore", str(REPOSITORY / "scripts" / "prepare_data.py")]
    command += ["--out", str(tmp_path / "own"), "--suffix", ".py", str(REPOSITORY / "cppmega")]
    environment = {"PYTHONPATH": str(REPOSITORY), "PATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = corpus.open_(tmp_path / "own")
    assert found.card is not None and found.card.tokens > 100_000
    assert done.stdout.split()[1] == found.card.fingerprint
    assert "preparing own" in done.stderr
    again = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert again.returncode == 1 and "error: data-exists" in again.stderr


def test_a_hugging_face_tokenizer(tmp_path: Path, sources: Path, indexed: Any) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    trained = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<end>"])
    trained.train_from_iterator([p.read_text() for p in sources.glob("*/*.txt")], trainer)
    file = tmp_path / "tokenizer" / "tokenizer.json"
    file.parent.mkdir()
    trained.save(str(file))
    with pytest.raises(CppmegaError, match="no-end-token"):
        tokens.load(str(file.parent))
    with pytest.raises(CppmegaError, match="no-end-token"):
        tokens.load(str(file), "<stop>")
    (file.parent / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}}')
    loaded = tokens.load(str(file.parent))
    (sources / "part0" / "latin1.txt").write_bytes("Stra\xdfe".encode("latin-1"))
    card = data.prepare(tmp_path / "out", [sources], loaded, shard_tokens=100)
    assert card.skipped == {"empty": 1, "binary": 1, "not UTF-8": 1}
    assert card.tokenizer.vocab_size == trained.get_vocab_size()
    text = next(p for p in files([sources], ()) if p.name == "0.txt").read_text()
    dataset = indexed(str(tmp_path / "out"))
    first = dataset[0]
    assert trained.decode(first[:-1].tolist()) == text
    assert first[-1] == trained.token_to_id("<end>")


def test_a_missing_or_broken_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CppmegaError, match="input-not-found"):
        tokens.load(str(tmp_path))
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CppmegaError, match="tokenizer-broken"):
        tokens.load(str(tmp_path))


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (lambda out: (out.with_name("out.bin")).unlink(), "data-not-found"),
        (lambda out: out.with_name("out.bin").write_bytes(b"\0" * 10), "data-broken"),
        (lambda out: out.with_name("out.idx").write_bytes(b"MMIDIDX"), "data-broken"),
        (lambda out: out.with_name("out.idx").write_bytes(b"x" * 400), "data-broken"),
        (lambda out: out.with_name("out.json").write_text("{"), "data-broken"),
        (
            lambda out: out.with_name("out.json").write_text(
                out.with_name("out.json").read_text().replace('"tokens": ', '"tokens": 1')
            ),
            "data-broken",
        ),
    ],
)
def test_damage_is_seen_before_training(
    tmp_path: Path, sources: Path, damage: Any, name: str
) -> None:
    prepared(tmp_path / "out", sources)
    assert corpus.open_(tmp_path / "out").documents == 40
    damage(tmp_path / "out")
    with pytest.raises(CppmegaError) as caught:
        corpus.open_(tmp_path / "out")
    assert caught.value.name == name


def test_a_wrong_path_names_what_is_there(tmp_path: Path, sources: Path) -> None:
    prepared(tmp_path / "out", sources)
    with pytest.raises(CppmegaError, match="that folder holds out"):
        corpus.open_(tmp_path / "aut")


def test_tokens_outside_of_the_vocabulary_are_seen(tmp_path: Path, sources: Path) -> None:
    prepared(tmp_path / "out", sources)
    found = corpus.open_(tmp_path / "out")
    corpus.check_ids(found, 257)
    with pytest.raises(CppmegaError, match="holds token 256"):
        corpus.check_ids(found, 256)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"fingerprint": "0" * 16}, "data-broken"),
        ({"schema": 2}, "data-broken"),
        ({"tokenizer": {}}, "data-broken"),
        ({"tokenizer": {"vocab_size": 257, "eod": 257}}, "data-broken"),
        ({"tokenizer": {"vocab_size": "257", "eod": 256}}, "data-broken"),
        ({"documents": 41}, "data-broken"),
        ({"dtype": "int32"}, "data-broken"),
    ],
)
def test_a_card_that_disagrees(
    tmp_path: Path, sources: Path, change: dict[str, Any], name: str
) -> None:
    prepared(tmp_path / "out", sources)
    card = tmp_path / "out.json"
    card.write_text(json.dumps(json.loads(card.read_text()) | change))
    with pytest.raises(CppmegaError) as caught:
        corpus.open_(tmp_path / "out")
    assert caught.value.name == name, caught.value.render()
    if "schema" in change:
        assert "schema 2" in caught.value.what and "upgrade cppmega" in caught.value.next


def test_a_file_of_that_name_which_is_not_a_card(tmp_path: Path, sources: Path) -> None:
    prepared(tmp_path / "out", sources)
    (tmp_path / "out.json").write_text('{"text": "the source of it"}')
    assert corpus.open_(tmp_path / "out").card is None


@pytest.mark.parametrize(
    "text",
    ["null", "[1, 2]", "7", '"card"', "true", "{}", "", "[" * 100_000, '{"a":' * 100_000, "\udcff"],
    ids=lambda text: text[:5].encode("ascii", "replace").decode(),
)
def test_a_card_that_is_no_object(tmp_path: Path, sources: Path, text: str) -> None:
    prepared(tmp_path / "out", sources)
    (tmp_path / "out.json").write_text(text, errors="surrogateescape")
    with pytest.raises(CppmegaError, match="data-broken"):
        corpus.open_(tmp_path / "out")


def test_a_pipe_as_a_card_is_not_read(tmp_path: Path, sources: Path) -> None:
    prepared(tmp_path / "out", sources)
    (tmp_path / "out.json").unlink()
    os.mkfifo(tmp_path / "out.json")
    with pytest.raises(CppmegaError, match="not a regular file"):
        corpus.open_(tmp_path / "out")


def test_a_dataset_is_not_taken_while_it_is_finished(
    tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data and index have their names a moment before the card, which says whose they are."""
    seen: list[str] = []
    rename = Path.replace

    def replace(self: Path, target: Path) -> Path:
        if self.name == "card.new":
            with pytest.raises(CppmegaError) as caught:
                corpus.open_(tmp_path / "out")
            seen.append(caught.value.name)
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    prepared(tmp_path / "out", sources)
    assert seen == ["data-unfinished"]
    assert corpus.open_(tmp_path / "out").card is not None


def test_megatron_reads_an_empty_sequence_as_nothing(tmp_path: Path, indexed: Any) -> None:
    """Which is why one is let through, also as the last one."""
    dataset = indexed(str(write(tmp_path / "data", [5, 6, 7], [2, 0, 1, 0])))
    assert [one.tolist() for one in dataset] == [[5, 6], [], [7], []]


def test_an_added_token_behind_a_gap_is_an_id(tmp_path: Path) -> None:
    """A tokenizer of 4 tokens may have the id 9."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"<unk>": 0, "a": 1, "b": 2, "<end>": 9}, "<unk>")
    tokenizers.Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    assert tokens.load(str(tmp_path), "<end>").vocab_size == 10
