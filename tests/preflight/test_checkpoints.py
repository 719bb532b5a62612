"""Preflight of checkpoints, and of what an applied page cannot serve: broken, and healthy."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from cppmega.checkpoints.tracker import TRACKER
from cppmega.preflight import examine as preflight
from cppmega.preflight.checks import checkpoint as checks
from cppmega.preflight.context import Context
from cppmega.preflight.findings import Finding
from cppmega.preflight.messages import CheckpointAnswer, CheckpointOrder
from cppmega.preflight.workers import checkpoint as workers
from tests.preflight.contexts import SLICE, SMOKE, holds, launch, parsed, refuses, says_nothing
from tests.preflight.datasets import on
from tests.support import patched, pristine

pytestmark = pytest.mark.slow


@pytest.fixture
def opened_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are opened in this process, which has torch, and not in many that import it."""

    def answer(module: str, order: CheckpointOrder, *_: object) -> CheckpointAnswer:
        return workers.open_all(order)

    monkeypatch.setattr(checks, "ask", answer)


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


@pytest.mark.usefixtures("opened_here")
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
    refuses("checkpoint", "nothing-to-do", short)
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


@pytest.mark.usefixtures("opened_here")
@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_a_checkpoint_that_says_nothing_still_has_shapes(tmp_path: Path) -> None:
    rows = {"embedding.word_embeddings.weight": (SLICE.padded_vocab_size + 1, 8)}
    checkpoint(tmp_path, rows)
    found = refuses("checkpoint", "checkpoint-of-another-model", resumed(tmp_path))
    assert f"rows of the embedding {SLICE.padded_vocab_size + 1}" in found.what
    assert f"hidden_size 8 and {SLICE.hidden_size}" in found.what


@pytest.mark.usefixtures("opened_here")
@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_what_an_applied_page_cannot_serve(tmp_path: Path) -> None:
    mamba = {"bf16": True, "hybrid_layer_pattern": "M*"}
    fresh = tmp_path / "fresh"

    def broken(context: Context) -> dict[str, Finding]:
        """The errors that depend on pages or on the checkpoint, by name."""
        found = {one.name: one for one in preflight.answers("rules", context)}
        return {n: found[n] for n in found if n in ("unsupported", "checkpoint-of-another-layout")}

    assert not broken(resumed(fresh, **mamba))
    aware = {"use_precision_aware_optimizer": True}
    assert "float16_keep_fp32" in broken(resumed(fresh, **mamba, **aware))["unsupported"].what
    assert not broken(resumed(fresh, bf16=True, hybrid_layer_pattern="*-", **aware))
    unpatched = launch(None, "--lr", "1", root=pristine("0.19.2"))
    unpatched.__dict__["process"] = parsed({**mamba, **aware})
    assert not broken(unpatched)

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
        found = broken(resumed(tmp_path / str(at), **mamba))
        assert bool(found) == bool(way_out)
        for error in found.values():
            assert names[0] in error.what and way_out in error.next
        assert not broken(resumed(tmp_path / str(at), **mamba, no_load_optim=True))


@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_the_checkpoint_of_a_loop(tmp_path: Path) -> None:
    save = tmp_path / "save"
    says_nothing("checkpoint", launch(SMOKE))
    loading = launch(SMOKE, "--load", str(save))
    refuses("checkpoint", "no-checkpoint", loading)
    folder = checkpoint(save, {"model.embedding.word_embeddings.weight": (257, 64)})
    assert "step 7, every checksum matches" in holds("checkpoint", loading)
    (shard,) = folder.glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:100])
    assert f"{shard}: it has 100 of" in refuses("checkpoint", "checkpoint-broken", loading).what
    (folder / ".metadata").unlink()
    assert ".metadata" in refuses("checkpoint", "checkpoint-broken", loading).what
    folder.rename(save / "iter_0000006")
    assert "iter_0000006" in refuses("checkpoint", "checkpoint-broken", loading).next
