"""A DSA layer whose indexer loss is not configured trains like one with the coefficient 0."""

import pytest

from tests.support import patched, python

LAYER = """
from unittest import mock

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig

from cppmega.proof import cpu_shims
from cppmega.proof.small_models import Norm, Projection

cpu_shims.init_distributed()
mock.patch.object(dsa, "rotate_activation", lambda x: x).start()


def run(coefficient, train=True):
    torch.manual_seed(0)
    config = MLATransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, q_lora_rank=8, kv_lora_rank=8,
        qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=8, add_bias_linear=False,
        experimental_attention_variant="dsa", dsa_indexer_n_heads=2, dsa_indexer_head_dim=8,
        dsa_indexer_topk=3, rope_type="rope",
    )
    config.dsa_indexer_loss_coeff = coefficient
    parts = dsa.DSAIndexerSubmodules(Projection, Projection, Norm, Projection)
    indexer = ModuleSpec(module=dsa.DSAIndexer, submodules=parts)
    layer = dsa.DSAttention(
        config, dsa.DSAttentionSubmodules(indexer), 1, AttnMaskType.causal, "self"
    ).train(train)
    query, key, value = (torch.randn(6, 1, 2, 12, requires_grad=True) for _ in range(3))
    hidden, compressed = torch.randn(6, 1, 16), torch.randn(6, 1, 8)
    out = layer(query, key, value, None, hidden, compressed, attn_mask_type=AttnMaskType.causal)
    out.square().sum().backward()
    return [out.detach(), query.grad, key.grad, value.grad, *(p.grad for p in layer.parameters())]


nothing, zero = run(None), run(0.0)
# The indexer's parameters have gradients, all zero: a bucketed gradient reduction waits for them.
assert len(nothing) == 9 and all(torch.equal(a, b) for a, b in zip(nothing, zero, strict=True))
assert all(grad.abs().sum() == 0 for grad in nothing[4:])
some = run(0.5)
assert torch.equal(some[0], zero[0]) and any(grad.abs().sum() > 0 for grad in some[4:])
assert torch.equal(run(None, train=False)[0], nothing[0])
print("done")
"""


@pytest.mark.parametrize("version", ["0.16.1", "0.18.2"])  # 0.17.1 has the text of 0.18.2
def test_none_is_zero(version: str) -> None:
    done = python(patched(version, "dsa_indexer_loss_off"), LAYER)
    assert done.stdout.endswith("done\n"), done.stderr
