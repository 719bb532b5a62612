"""DSA with a key per head trains as absorbed DSA does, with the same parameters."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cppmega.catalogue import loader as catalogue
from cppmega.errors import CppmegaError
from cppmega.recipe import index as recipes
from cppmega.recipe.memory import KEY_PER_HEAD, estimate
from tests.support import patched, pristine, python
from tests.support.rules import broken

PAGE = "dsa_key_per_head"


def _found(root: Path, out: Path, ranks: int) -> list[dict[str, Any]]:
    place = "tests.upstream_patches.dsa.per_head_models"
    code = f"from {place} import main; main({str(out)!r}, {ranks})"
    done = python(root, code, nproc=ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(f"{out}.{rank}") for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_gradients_and_weights_are_stocks(tmp_path: Path, ranks: int) -> None:
    theirs = _found(pristine("0.19.2"), tmp_path / "stock", ranks)
    ours = _found(patched("0.19.2", PAGE), tmp_path / "ours", ranks)
    for of_ours, of_theirs in zip(ours, theirs, strict=True):
        assert of_ours.keys() == of_theirs.keys()
        for name, mine in of_ours.items():
            other = of_theirs[name]
            assert mine["classes"] == ["MLASelfAttention"], name
            assert other["classes"] == ["AbsorbedMLASelfAttention"], name
            for part in ("weights", "gradients"):
                assert mine[part].keys() == other[part].keys()
            for key, weight in mine["weights"].items():
                assert torch.equal(weight, other["weights"][key]), (name, key)
            # Without sequence parallelism, ranks do not add up what heads give to shared keys.
            for key, gradient in mine["gradients"].items() if ranks == 1 else ():
                torch.testing.assert_close(
                    gradient, other["gradients"][key], rtol=1e-4, atol=1e-5, msg=f"{name} {key}"
                )
            torch.testing.assert_close(mine["loss"], other["loss"])


def _refused(**given: Any) -> list[CppmegaError]:
    run = {
        "experimental_attention_variant": "dsa",
        "dsa_kernel_backend": "none",
        "dsa_indexer_topk": 2048,
        "seq_length": 8192,
        "num_layers": 1,
        "bf16": True,
        **{"qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128},
    }
    return broken(PAGE, **run | given)


def test_what_is_slower_or_has_no_kernel_is_refused() -> None:
    assert not _refused()
    for given in (
        {"seq_length": 8193},
        {"dsa_kernel_backend": "tilelang"},
        {"dsa_kernel_backend": "cudnn"},
        {"qk_head_dim": 256},
    ):
        assert len(_refused(**given)) == 1, given
        assert not _refused(experimental_attention_variant=None, **given)


def test_absorbed_layers_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = catalogue.load()
    run = SimpleNamespace(
        experimental_attention_variant="dsa",
        overlap_param_gather=True,
        fp8="hybrid",
        recompute_granularity="selective",
        recompute_modules=["mla_up_proj"],
    )
    for name in ("absorbed_mla_gathered_weight", "absorbed_mla_quantized_recompute"):
        when = pages[name].patch.when
        assert when is not None
        monkeypatch.delenv(KEY_PER_HEAD[0], raising=False)
        assert when(run)
        monkeypatch.setenv(*KEY_PER_HEAD)
        assert not when(run)


def test_narrower_heads_are_estimated_to_keep_less() -> None:
    recipe = recipes.load("dsv32_h100_cut")
    assert KEY_PER_HEAD in recipe.gates
    absorbed = recipe.with_(gates=())
    assert estimate(recipe, attends=True).total < estimate(absorbed, attends=True).total
