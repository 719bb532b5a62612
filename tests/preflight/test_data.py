"""Preflight of recipe, data and checkpoint: each check broken, and each healthy."""

from __future__ import annotations

import struct
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from cppmega.checkpoints.tracker import TRACKER
from cppmega.data import corpus
from cppmega.data import reading as data_reading
from cppmega.data.corpus import Card, StructureRecord, with_suffix
from cppmega.data.structure import COLUMN, DEFINITION
from cppmega.data.tokenizers import TokenizerRecord
from cppmega.errors import CppmegaError
from cppmega.overlay.verbs import Session
from cppmega.preflight import context as check
from cppmega.preflight.context import Context
from cppmega.recipe import Structure
from cppmega.recipe import index as recipes_index
from cppmega.recipe.run_options import RunOptions
from cppmega.training import plan, requirements
from tests.preflight.contexts import SLICE, SMOKE, holds, launch, parsed, refuses, says_nothing
from tests.support import REPOSITORY, patched, pristine
from tests.support.datasets import write

pytestmark = pytest.mark.slow

BYTES = {"kind": "byte", "vocab_size": 257, "eod": 256}


def dataset(prefix: Path, tokens: int = 20_000, **tokenizer: Any) -> Path:
    """An indexed dataset of bytes, with its card."""
    ids = (np.arange(tokens) % 257).astype(np.uint16)
    with_suffix(prefix, ".bin").write_bytes(ids.tobytes())
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, 1, 2)
    body = np.array([tokens], np.int32).tobytes() + np.array([0, 0, 1], np.int64).tobytes()
    with_suffix(prefix, ".idx").write_bytes(head + body)
    data, index = corpus.digest(prefix)
    card = Card(
        tokenizer=TokenizerRecord(**{**BYTES, **tokenizer}),
        documents=1,
        tokens=tokens,
        dtype="uint16",
        bin_sha256=data,
        idx_sha256=index,
        sources=1,
    )
    with_suffix(prefix, ".json").write_text(card.dump())
    return prefix


def with_structure(prefix: Path, **of_record: Any) -> Path:
    """A dataset of bytes whose tokens have structure ids."""
    card = corpus.read_card(dataset(prefix))
    assert card is not None
    ids = np.arange(card.tokens) % 144
    data, index = corpus.digest(
        write(with_suffix(prefix, COLUMN), ids, [card.tokens], dtype="uint8")
    )
    record = StructureRecord(
        **{
            "definition": DEFINITION,
            "grammars": {},
            "tokenizer": card.tokenizer.digest,
            "documents": {"c": 1},
            "bin_sha256": data,
            "idx_sha256": index,
            **of_record,
        }
    )
    with_suffix(prefix, ".json").write_text(structs.replace(card, structure=record).dump())
    return prefix


def on(prefix: Path | None, *words: str, recipe: Any = SLICE, **more: Any) -> Context:
    given = ("--data", str(prefix)) if prefix is not None else ()
    return launch(recipe, *given, *words, root=patched("0.19.2"), **more)


def test_recipe_complete(tmp_path: Path) -> None:
    assert "nothing left out" in holds("recipe_complete", on(None))
    whole = recipes_index.load("nam56r_h200_8gpu_bf16")
    assert "nothing left out" in holds("recipe_complete", on(None, recipe=whole))
    older = launch(whole, root=patched("0.18.2"))
    said = refuses("recipe_complete", "recipe-not-complete", older).what
    assert "13 layers M (Mamba-3): cppmega adds it to megatron-core 0.19" in said
    library = launch(SLICE, root=pristine("0.16.1"))
    refuses("recipe_complete", "training-not-in-wheel", library)
    says_nothing("recipe_complete", on(None, recipe=SMOKE))
    says_nothing("recipe_complete", launch(root=patched("0.19.2")))


def test_a_file_with_the_name_of_a_shipped_recipe(tmp_path: Path) -> None:
    file = tmp_path / "nam56r_h200_slice.py"
    file.write_text(
        "from cppmega.recipe.index import load\nRECIPE = load('nam56r_h200_slice').with_(lr=1e-3)\n"
    )
    mine = recipes_index.load(str(file))
    found = refuses("recipe_complete", "two-recipes", on(None, recipe=mine, recipe_file=file))
    assert "different" in found.what
    shipped = REPOSITORY / "recipes" / "nam56r_h200_slice.py"
    holds("recipe_complete", on(None, recipe_file=shipped))


def test_words_that_no_trainer_takes() -> None:
    with pytest.raises(CppmegaError, match="often") as caught:
        launch(SLICE, "--save-interval", "often", root=patched("0.19.2"))
    assert caught.value.name == "wrong-usage"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--jsn",), "--jsn"),
        (("--", "--lr", "3"), "--lr 3"),
        (("--mock-data",), "--mock-data"),
        (("--data", "a", "--data", "b"), "not 2"),
    ],
)
def test_words_that_a_loop_on_cpu_does_not_take(words: tuple[str, ...], said: str) -> None:
    context = launch(SMOKE, *words, root=patched("0.19.2"))
    assert said in refuses("recipe_complete", "not-supported", context).what


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
    assert "another tokenizer" in refuses("data", "data-card-broken", other).what
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
    monkeypatch.setattr(requirements, "check_complete", lambda recipe, rendered: None)
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
    says_nothing("line_data", on(None, "--mock-data"))


def resumed(save: Path, recipe: Any = SLICE, **of_the_line: Any) -> Context:
    """A launch that resumes from a folder."""
    context = on(None, "--mock-data", "--save", str(save), recipe=recipe)
    args = {"hidden_size": 4096, "num_layers": None, "num_attention_heads": 32} | of_the_line
    context.__dict__["process"] = parsed(args)
    return context


def checkpoint(save: Path, shapes: Any = None, common: Any = None) -> Path:
    """What Megatron leaves of a finished step; returns the folder of the step."""
    import torch
    import torch.distributed.checkpoint as dcp

    folder = save / "iter_0000007"
    tensors = {name: torch.zeros(shape) for name, shape in (shapes or {"weight": 9}).items()}
    dcp.save(tensors, checkpoint_id=folder, no_dist=True)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    torch.save({"iteration": 7, **(common or {})}, folder / "common.pt")
    (save / TRACKER).write_text("7")
    return folder


MINE = {"cppmega_recipe": SLICE.name, "hidden_size": 4096, "num_attention_heads": 32}


@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_checkpoints(tmp_path: Path) -> None:
    says_nothing("checkpoint", resumed(tmp_path / "fresh"))
    good = tmp_path / "good"
    folder = checkpoint(good, common={"args": Namespace(**MINE)})
    said = holds("checkpoint", resumed(good))
    assert "step 7, of nam56r_h200_slice, every checksum matches" in said
    args = Namespace(**(MINE | {"cppmega_recipe": "dsv32_h200_slice"}))
    checkpoint(tmp_path / "other", common={"args": args})
    found = refuses("checkpoint", "checkpoint-of-another-recipe", resumed(tmp_path / "other"))
    assert "dsv32_h200_slice" in found.what
    wide = resumed(good, hidden_size=8192)
    assert (
        "hidden_size 4096 and 8192"
        in refuses("checkpoint", "checkpoint-of-another-model", wide).what
    )
    short = resumed(good, recipe=SLICE.with_(train_iters=7))
    refuses("checkpoint", "nothing-to-train", short)
    (folder / "common.pt").write_bytes(b"torn")
    refuses("checkpoint", "checkpoint-broken", resumed(good))
    (folder / "common.pt").unlink()
    assert "does not name its recipe" in holds("checkpoint", resumed(good))
    started = launch(None, "--save", "new", "--load", "new", root=patched("0.19.2"))
    says_nothing("checkpoint", started)
    gone = on(None, "--mock-data", "--load", str(tmp_path / "gone"))
    refuses("checkpoint", "no-checkpoint", gone)
    folder.rename(good / "iter_0000006")
    assert "iter_0000007" in refuses("checkpoint", "checkpoint-broken", resumed(good)).what


@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_a_checkpoint_that_says_nothing_still_has_shapes(tmp_path: Path) -> None:
    rows = {"embedding.word_embeddings.weight": (SLICE.padded_vocab_size + 1, 8)}
    checkpoint(tmp_path, rows)
    found = refuses("checkpoint", "checkpoint-of-another-model", resumed(tmp_path))
    assert f"rows of the embedding {SLICE.padded_vocab_size + 1}" in found.what
    assert f"hidden_size 8 and {SLICE.hidden_size}" in found.what


@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_what_an_applied_page_cannot_serve(tmp_path: Path) -> None:
    mamba = {"bf16": True, "hybrid_layer_pattern": "M*"}
    fresh = tmp_path / "fresh"
    assert "float16_keep_fp32" in holds("page_limits", resumed(fresh, **mamba))
    aware = {"use_precision_aware_optimizer": True}
    refuses("page_limits", "kept-fp32-precision-aware", resumed(fresh, **mamba, **aware))
    holds("page_limits", resumed(fresh, bf16=True, hybrid_layer_pattern="*-", **aware))
    unpatched = launch(None, "--lr", "1", root=pristine("0.19.2"))
    unpatched.__dict__["process"] = parsed({**mamba, **aware})
    says_nothing("page_limits", unpatched)

    sizes = {"dsa_indexer_n_heads": 32, "dsa_indexer_head_dim": 64}
    sizes |= {"kv_lora_rank": 64, "qk_pos_emb_head_dim": 64, "dsa_indexer_loss_coeff": 0}
    sizes["dsa_kernel_backend"] = "none"
    sparse: dict[str, Any] = {
        "bf16": True,
        "fp16": False,
        "experimental_attention_variant": "dsa",
        "num_layers": 2,
        **sizes,
    }
    holds("page_limits", resumed(fresh, **sparse))
    for change, what in (({"bf16": False}, "fp32"), ({"dsa_indexer_n_heads": 192}, "192")):
        found = refuses(
            "page_limits", "dsa-indexer-kernels-decline", resumed(fresh, **sparse | change)
        )
        assert what in found.what
        cudnn = resumed(fresh, **sparse | change | {"dsa_kernel_backend": "cudnn"})
        if "bf16" in change:  # neither has that backend
            refuses("page_limits", "dsa-backend-cannot-run", cudnn)
        else:
            holds("page_limits", cudnn)

    bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_1.dtype_({0}, {0}).bucket_idx_0.param"
    moment, copy = (
        f"optimizer.state.{key}.decoder.layers.mixer.A_log" for key in ("exp_avg", "fp32_param")
    )
    for at, (names, way_out) in enumerate(
        (
            ((bucket.format("torch.float32"),), "--dist-ckpt-optim-fully-reshardable"),
            ((bucket.format("torch.bfloat16"),), ""),
            ((moment,), "--no-load-optim"),
            ((moment, copy), ""),
        )
    ):
        checkpoint(tmp_path / str(at), dict.fromkeys(names, 4))
        context = resumed(tmp_path / str(at), **mamba)
        if not way_out:
            holds("page_limits", context)
            continue
        found = refuses("page_limits", "checkpoint-of-split-optimizer", context)
        assert names[0] in found.what and way_out in found.next
        holds("page_limits", resumed(tmp_path / str(at), **mamba, no_load_optim=True))


def of_the_loop(**other: int) -> dict[str, tuple[int, ...]]:
    """Tensors of the model of a CPU loop, as Megatron 0.19 names them."""
    has = {"layers": 2, "depths": 2, "hidden": 64, "ffn": 256, "rows": 257, "places": 128} | other
    depths = {f"model.mtp.layers.{n}.enorm.weight": (has["hidden"],) for n in range(has["depths"])}
    return {
        "model.embedding.word_embeddings.weight": (has["rows"], has["hidden"]),
        "model.embedding.position_embeddings.weight": (has["places"], has["hidden"]),
        "model.decoder.layers.mlp.linear_fc1.weight": (has["layers"], has["ffn"], has["hidden"]),
        **depths,
    }


@pytest.mark.filterwarnings("ignore:torch.distributed")
@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({}, ""),
        ({"layers": 3}, "num_layers 3 and 2"),
        ({"depths": 1}, "mtp_num_layers 1 and 2"),
        ({"depths": 0}, "mtp_num_layers 0 and 2"),
        ({"hidden": 32}, "hidden_size 32 and 64"),
        ({"ffn": 128}, "ffn_hidden_size 128 and 256"),
        ({"rows": 300}, "vocab_size 300 and 257"),
        ({"places": 64}, "seq_length 64 and 128"),
    ],
)
def test_a_loop_is_not_given_another_model(
    tmp_path: Path, other: dict[str, int], words: str
) -> None:
    checkpoint(tmp_path, of_the_loop(**other), {"num_attention_heads": 4})
    loading = launch(SMOKE, "--load", str(tmp_path))
    if words:
        assert words in refuses("checkpoint", "checkpoint-of-another-model", loading).what
    else:
        assert "step 7, every checksum matches" in holds("checkpoint", loading)
        heads = launch(SMOKE.with_(num_attention_heads=8), "--load", str(tmp_path))
        found = refuses("checkpoint", "checkpoint-of-another-model", heads)
        assert "num_attention_heads 4 and 8" in found.what


@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_the_checkpoint_of_a_loop(tmp_path: Path) -> None:
    save = tmp_path / "save"
    says_nothing("checkpoint", launch(SMOKE))
    loading = launch(SMOKE, "--load", str(save))
    refuses("checkpoint", "no-checkpoint", loading)
    folder = checkpoint(save, of_the_loop())
    holds("checkpoint", loading)
    (shard,) = folder.glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:100])
    assert f"{shard}: it has 100 of" in refuses("checkpoint", "checkpoint-broken", loading).what
    (folder / ".metadata").unlink()
    assert ".metadata" in refuses("checkpoint", "checkpoint-broken", loading).what
    folder.rename(save / "iter_0000006")
    assert "iter_0000006" in refuses("checkpoint", "checkpoint-broken", loading).next


def test_arguments_that_are_the_recipes_or_the_trainers() -> None:
    harmless = on(None, "--mock-data", "--save", "here", "--", "--log-params-norm")
    holds("owned_arguments", harmless)
    says_nothing("owned_arguments", launch(None, "--lr", "1", root=patched("0.19.2")))
    for words, instead in (
        (("--save", "/elsewhere"), "--save /elsewhere before the --"),
        (("--data-path=x",), "--data x before the --"),
        (("--micro-batch-size", "7"), "--set micro_batch_size=7"),
        (("--qk-layernorm", "--lr=1"), "--set qk_layernorm=True"),
    ):
        asked = on(None, "--mock-data", "--", *words)
        assert refuses("owned_arguments", "argument-not-megatrons", asked).next == instead
    own = on(None, "--mock-data", recipe=SLICE.plus("--lr", "1"))
    refuses("owned_arguments", "argument-not-megatrons", own)


def test_the_corpus_of_a_loop(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    asked = launch(SMOKE, "--data", str(folder))
    says_nothing("data", asked)
    folder.mkdir()
    dataset(folder / "train")
    says_nothing("data", asked)
    dataset(folder / "held_out")
    holds("data", asked)
    (folder / "train.bin").write_bytes(b"cut off")
    assert "leave out --data" in refuses("data", "data-broken", asked).next
    (folder / "train.bin").unlink()
    refuses("data", "data-not-found", asked)
    # Somebody's dataset, which the loop would not read.
    refuses("data", "not-supported", launch(SMOKE, "--data", str(folder / "held_out")))
