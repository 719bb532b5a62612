"""The indexer's scores are those of 0.19, and a permutation of the rows restores the old ones."""

import json

import pytest

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

spec = importlib.util.spec_from_file_location("stock_dsa", STOCK)
stock = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stock)
stock.rotate_activation = lambda x: x
for rope_type in ("rope", "yarn"):
    old, new = indexer(stock.DSAIndexer, rope_type), indexer(rope_type=rope_type)
    before = scores(old)
    assert not torch.allclose(before, scores(new), atol=1e-3)
    # The page's recipe: the last ROPE channels first, the even ones before the odd, then the rest.
    order = [*range(DIM - ROPE, DIM, 2), *range(DIM - ROPE + 1, DIM, 2), *range(DIM - ROPE)]
    heads = [head * DIM + at for head in range(HEADS) for at in order]
    rows = {"linear_wq_b.weight": heads}
    rows |= dict.fromkeys(("linear_wk.weight", "k_norm.weight", "k_norm.bias"), order)
    state = {k: v[rows[k]] if k in rows else v for k, v in old.state_dict().items()
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
