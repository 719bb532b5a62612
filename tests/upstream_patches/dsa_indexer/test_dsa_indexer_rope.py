"""The indexer's scores are those of 0.19, and a permutation of the rows restores the old ones."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cppmega.errors import CppmegaError
from tests.support import patched, pristine, python

SCORES = """
import json

import torch
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.transformer_config import MLATransformerConfig

from cppmega.proof import cpu_shims
from cppmega.proof.small_models import Norm, Projection

cpu_shims.init_distributed()
dsa.rotate_activation = lambda x: x  # a rotation of both sides: no scores change
ROPE, DIM, HEADS = 4, 6, 2


def indexer(kind=dsa.DSAIndexer, rope_type="rope"):
    torch.manual_seed(0)
    config = MLATransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, q_lora_rank=8, kv_lora_rank=8,
        qk_head_dim=8, qk_pos_emb_head_dim=ROPE, v_head_dim=8, add_bias_linear=False,
        experimental_attention_variant="dsa", dsa_indexer_n_heads=HEADS, dsa_indexer_head_dim=DIM,
        dsa_indexer_topk=3, rope_type=rope_type,
    )
    made = kind(config, dsa.DSAIndexerSubmodules(Projection, Projection, Norm, Projection))
    for parameter in made.k_norm.parameters():
        torch.nn.init.normal_(parameter)
    return made


def scores(indexer):
    torch.manual_seed(1)
    x, compressed = torch.randn(8, 2, 16), torch.randn(8, 2, 8)
    return indexer.forward_with_scores(x, compressed)[0].detach()
"""
PATCHED = """
import importlib.util

from cppmega.runtime.dsa_indexer_rope import permuted

spec = importlib.util.spec_from_file_location("stock_dsa", STOCK)
stock = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stock)
stock.rotate_activation = lambda x: x
for rope_type in ("rope", "yarn"):
    old, new = indexer(stock.DSAIndexer, rope_type), indexer(rope_type=rope_type)
    before = scores(old)
    assert not torch.allclose(before, scores(new), atol=1e-3)
    rows = ("linear_wq_b.weight", "linear_wk.weight", "k_norm.weight", "k_norm.bias")
    state = {k: permuted(v, DIM, ROPE) if k in rows else v for k, v in old.state_dict().items()
             if v is not None}
    new.load_state_dict(state, strict=False)
    assert torch.allclose(before, scores(new), atol=1e-5)
"""
PRINT = "\nprint(json.dumps([scores(indexer(rope_type=t)).tolist() for t in ('rope', 'yarn')]))\n"
DSA = "megatron/core/transformer/experimental_attention_variant/dsa.py"


def test_scores_are_those_of_0_19() -> None:
    stock = f"STOCK = {str(pristine('0.18.2') / DSA)!r}\n"
    done = python(patched("0.18.2", "dsa_indexer_rope"), stock + SCORES + PATCHED + PRINT)
    assert done.returncode == 0, done.stderr
    newer = python(pristine("0.19.2"), SCORES + PRINT)
    assert newer.returncode == 0, newer.stderr
    ours, theirs = (json.loads(run.stdout.splitlines()[-1]) for run in (done, newer))
    flat = [float(x) for run in ours for row in run for line in row for x in line]
    assert flat == pytest.approx([x for run in theirs for row in run for line in row for x in line])
    assert len(flat) == 2 * 2 * 8 * 8


STOCK, PAGE = {"CPPMEGA_DSA_INDEXER_ROWS": "stock"}, {"CPPMEGA_DSA_INDEXER_ROWS": "page"}
ALONE = ["--no-load-optim"]


@pytest.mark.parametrize("version", ["0.17.1", "0.18.2"])
def test_a_checkpoint_of_stock_is_loaded_only_as_stated(version: str, tmp_path: Path) -> None:
    stock, page = (str(tmp_path / name) for name in ("stock", "page"))

    def run(root: Path, *jobs: dict[str, Any]) -> Any:
        module = "tests.upstream_patches.dsa_indexer.dsa_indexer_rows_run"
        code = f"import {module} as t; t.run(*{jobs!r})"
        done = python(root, code)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    (wanted,) = run(pristine(version), {"folder": stock, "line": [], "save": True, "load": False})
    shutil.copytree(stock, page)
    found = run(
        patched(version, "dsa_indexer_rope"),
        {"folder": stock, "line": ALONE},
        {"folder": stock, "line": ["--finetune"]},
        {"folder": stock, "line": [], "env": STOCK},
        {"folder": stock, "line": ALONE, "env": PAGE},
        {"folder": page, "line": ALONE, "env": STOCK, "save": True},
        # It is recorded from then on, whatever the variable still says.
        {"folder": page, "line": ALONE},
        {"folder": page, "line": ALONE, "env": STOCK},
    )
    unknown = "dsa-indexer-rows"
    assert found[:3] == [unknown, unknown, "dsa-indexer-rows"]
    assert [_close(scores, wanted) for scores in found[3:]] == [False, True, True, True]


def _close(one: Any, other: Any) -> bool:
    flat = [[x for row in scores for line in row for x in line] for scores in (one, other)]
    return len(flat[0]) == len(flat[1]) and flat[0] == pytest.approx(flat[1], rel=1e-4, abs=1e-4)


def test_the_trainers_record_of_its_pages_is_enough() -> None:
    torch = pytest.importorskip("torch")
    from cppmega.runtime import dsa_indexer_rope as dsa_indexer_rows

    args = SimpleNamespace(qk_pos_emb_head_dim=2, dsa_indexer_head_dim=4)
    name = "decoder.layers.0.self_attention.core_attention.indexer.linear_wk.weight"

    def load(**saved: Any) -> str:
        try:
            state = {"args": SimpleNamespace(**saved), "model1": {name: torch.ones(4, 1)}}
            dsa_indexer_rows.load(args, state)
        except CppmegaError as error:
            return error.name
        return "loaded"

    def record(megatron: str, *pages: str) -> str:
        return json.dumps({"megatron": megatron, "pages": {page: {} for page in pages}})

    assert load() == load(cppmega_patches="none") == "dsa-indexer-rows"
    assert load(cppmega_patches=record("0.18.2", "own")) == "dsa-indexer-rows"
    assert load(cppmega_patches=record("0.18.2", "dsa_indexer_rope")) == "loaded"
    assert load(cppmega_patches=record("0.19.2")) == "loaded"
