"""The reported FLOPs against those that torch counts while a real layer runs."""

import pytest

from tests.support import patched, pristine, python

COUNT = """
import ast
import os
from pathlib import Path
from unittest import mock

import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import multi_latent_attention as mla
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.training import training

from cppmega.proof import cpu_shims
from cppmega.proof.small_models import Norm, Projection
from cppmega.proof.stand_ins import Arguments

cpu_shims.init_distributed()
mock.patch.object(dsa, "rotate_activation", lambda x: x).start()  # wants a package nobody can build

SHAPE = dict(hidden_size=32, num_attention_heads=4, q_lora_rank=16, kv_lora_rank=24, qk_head_dim=8,
             qk_pos_emb_head_dim=4, v_head_dim=12)
INDEXER = dict(dsa_indexer_n_heads=3, dsa_indexer_head_dim=8, dsa_indexer_topk=64)
absorbed = hasattr(dsa.DSAttention, "consumes_absorbed_v_up_projection")


class Core(DotProductAttention):
    def __init__(self, k_channels=None, v_channels=12, **kwargs):
        super().__init__(**kwargs)
        self.hidden_size_per_partition = v_channels * SHAPE["num_attention_heads"]


def build(symbol, **config):
    config = MLATransformerConfig(
        num_layers=1, use_cpu_initialization=True, add_bias_linear=False, rope_type="rope",
        experimental_attention_variant="dsa" if symbol == "D" else None,
        **SHAPE, **INDEXER, **config,
    )
    module, submodules, core = mla.MLASelfAttention, mla.MLASelfAttentionSubmodules, Core
    if symbol == "D":
        parts = dsa.DSAIndexerSubmodules(Projection, Projection, Norm, Projection)
        indexer = ModuleSpec(module=dsa.DSAIndexer, submodules=parts)
        core = ModuleSpec(dsa.DSAttention, submodules=dsa.DSAttentionSubmodules(indexer))
        if absorbed:
            from megatron.core.transformer.experimental_attention_variant import absorbed_mla

            module = absorbed_mla.AbsorbedMLASelfAttention
            submodules = absorbed_mla.AbsorbedMLASelfAttentionSubmodules
    linears = dict.fromkeys(
        ["linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj",
         "linear_kv_up_proj"], ColumnParallelLinear)
    parts = submodules(**linears, core_attention=core, linear_proj=RowParallelLinear,
                       q_layernorm=IdentityOp, kv_layernorm=IdentityOp)
    spec = ModuleSpec(module, params={"attn_mask_type": AttnMaskType.causal}, submodules=parts)
    return build_module(spec, config=config, layer_number=1)


def run(symbol, loss):
    \"\"\"FLOPs of forward and backward of two sequences of 16 tokens, all 256 pairs of each.\"\"\"
    layer = build(symbol, dsa_indexer_loss_coeff=loss)
    x = torch.randn(16, 2, 32, requires_grad=True)
    mask = torch.triu(torch.ones(1, 1, 16, 16, dtype=torch.bool), 1)
    with FlopCounterMode(display=False) as counter:
        layer(x, mask)[0].sum().backward()
    return counter.get_total_flops()


# One sequence of 32 has as many tokens as two of 16, and its causal half is all of their pairs.
BASE = dict(
    **SHAPE, **INDEXER, num_layers=1, seq_length=32, ffn_hidden_size=0, padded_vocab_size=0,
    multi_latent_attention=True, mamba_state_dim=1, mamba_num_groups=1, mamba_num_heads=1,
    mamba_head_dim=1, kv_channels=1, num_query_groups=1, moe_ffn_hidden_size=1, moe_router_topk=1,
    dsa_indexer_use_sparse_loss=False,
)


def flops(batch=1, function=training.num_floating_point_operations, **given):
    return function(Arguments(**{**BASE, **given}), batch)


def gpt(**given):
    norms = 6 * 32 * (16 + 24) * (1 + given.get("mtp_num_layers", 0))
    return flops(experimental_attention_variant="dsa", **given) - norms


hybrid = lambda pattern, **given: flops(hybrid_layer_pattern=pattern, **given)

# ---- what torch counts in a real layer
keys = 28 if absorbed else 12
target = 2 * 512 * 4 * keys  # the scores of the attention that the indexer learns from
scores = 2 * 512 * 3 * 8
trained = run("D", 1e-3)
# The unfused backward computes the target and (twice) the scores anew: that is not the model's.
assert gpt(dsa_indexer_loss_coeff=1e-3) == trained - 2 * target - 2 * scores, trained
if absorbed:
    assert gpt() == run("D", None)
tree = ast.parse(Path(STOCK).read_text())
kept = [n for n in tree.body if getattr(n, "name", "") == "num_floating_point_operations"]
namespace = dict(vars(training))
exec(compile(ast.Module(kept, []), "stock", "exec"), namespace)
stock = namespace["num_floating_point_operations"]
mla_layer = run("M", None)
norms = 6 * 32 * (16 + 24)
assert flops(function=stock) - norms == flops() - norms == mla_layer  # a GPT with MLA, no DSA
dense = flops(experimental_attention_variant="dsa", function=stock) - norms
assert dense == mla_layer != gpt()  # stock takes DSA for MLA

# ---- top-k, against a sum over the pairs
def pairs(length, k):
    return sum(min(at, k) for at in range(1, length + 1))

wide, narrow = (gpt(seq_length=4096, dsa_indexer_topk=k) for k in (4096, 256))
tokens = 4096 / 32
left_out = 6 * 4 * (keys + (24 if absorbed else 12)) * (pairs(4096, 4096) - pairs(4096, 256))
assert abs(wide - narrow - left_out) / left_out < 1e-3

# ---- MTP and an untrained indexer
assert gpt(mtp_num_layers=1) == 2 * gpt() + 6 * 32 * (3 * 32 + 2 * 32 * 32)  # upstream's MTP part
one = gpt(dsa_indexer_loss_coeff=1e-3) - gpt()
assert one == 2 * 32 * 736 + 4 * 512 * 24
sparse = dict(dsa_indexer_loss_coeff=1e-3, dsa_indexer_topk=8, dsa_indexer_use_sparse_loss=True)
assert gpt(**sparse) < gpt(**{**sparse, "dsa_indexer_use_sparse_loss": False})

if HYBRID:
    layer = gpt()
    assert hybrid("D") == layer and hybrid("DD|D") == 3 * layer and hybrid("D/DD/DD") == 5 * layer
    assert hybrid("D", function=stock) == 0
    for pattern in ("M*-E", "M*/M*/M*"):
        assert hybrid(pattern) == hybrid(pattern, function=stock) > 0
    assert hybrid("MD") == hybrid("M") + hybrid("D")
if absorbed:
    assert hybrid("+") == mla_layer and hybrid("+D|+/+") == 3 * mla_layer + layer
    # 52 layers of which every fourth from the fifth computes a top-k: layers 5, 21 and 37 do.
    share = dict(dsa_indexer_topk_freq=16, dsa_indexer_skip_topk_offset=5, dsa_indexer_loss_coeff=1)
    sparse = (5, 9, 13, 21, 25, 29, 37, 41, 45)
    pattern = "".join("D" if at in sparse else "+" for at in range(1, 53))
    own = hybrid("D", dsa_indexer_loss_coeff=1)
    attention = own - 2 * 2 * 32 * 736 - 6 * 512 * 24
    shared = 43 * mla_layer + 3 * own + 6 * attention
    assert hybrid(pattern, **share) == shared
    with mock.patch.dict(os.environ, CPPMEGA_DSA_INDEX_PATTERN="FSSFSSFSS"):
        named = dict(dsa_indexer_loss_coeff=1)
        assert hybrid(pattern, **named) == 43 * mla_layer + 9 * own  # its switch is off
        with mock.patch.dict(os.environ, CPPMEGA_INDEX_CACHE="1"):
            assert hybrid(pattern, **named) == shared
            assert hybrid(pattern + "/+D/+D", **named) == shared + 2 * (mla_layer + own)
print("done")
"""
TRAINING = "megatron/training/training.py"


@pytest.mark.parametrize("version", ["0.17.1", "0.18.2", "0.19.2"])
def test_the_formulas_are_what_a_real_layer_computes(version: str) -> None:
    hybrid = version != "0.17.1"
    code = f"STOCK, HYBRID = {str(pristine(version) / TRAINING)!r}, {hybrid}\n" + COUNT
    done = python(patched(version, "flops_of_mla_and_dsa_layers"), code, nproc=1)
    assert done.stdout.endswith("done\n"), done.stderr
