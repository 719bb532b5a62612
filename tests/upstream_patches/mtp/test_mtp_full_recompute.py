"""A GPT with MTP layers trains the same with and without full recompute, packed or not."""

import pytest

from tests.support import patched, pristine, python

TRAIN = """
import contextlib
import importlib.util
import sys
from unittest import mock

import torch
from megatron.core.fusions import fused_softmax
from megatron.core.models.gpt import gpt_layer_specs as specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import random
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_config import TransformerConfig

from cppmega.proof import cpu_shims

cpu_shims.init_distributed()
mock.patch.object(random, "_get_cuda_rng_state", return_value=None).start()
mock.patch.object(random, "_set_cuda_rng_state").start()
fused_softmax.get_default_causal_mask = lambda n: torch.ones(n, n).triu(1).bool()


class Packed(DotProductAttention):
    def forward(self, query, key, value, *args, packed_seq_params=None, **kwargs):
        if packed_seq_params is not None:  # the CPU's attention knows no packing: attend to all
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        return super().forward(query, key, value, *args, **kwargs)


def build(recompute):
    torch.manual_seed(0)
    full = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, mtp_num_layers=2,
        use_cpu_initialization=True, hidden_dropout=0.1, attention_dropout=0.0,
        **(full if recompute else {}),
    )
    spec = specs.get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = Packed
    mtp = specs.get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    return GPTModel(config, spec, 32, 8, position_embedding_type="none", mtp_block_spec=mtp)


def train(recompute, packed, method=None):
    model, calls = build(recompute), []
    if method:
        model.config.recompute_method = method
    for name, module in model.named_modules():
        if isinstance(module, MultiTokenPredictionLayer):
            inner = getattr(module, "mtp_model_layer", None) or module.transformer_layer
            inner.register_forward_pre_hook(lambda m, a, k: calls.append(k), with_kwargs=True)
    tokens = torch.arange(8).view(1, 8) % 32
    lengths = torch.tensor([0, 3, 8], dtype=torch.int32)
    params = PackedSeqParams("thd", lengths, lengths, max_seqlen_q=5, max_seqlen_kv=5)
    mask = torch.triu(torch.ones(1, 1, 8, 8, dtype=torch.bool), 1)
    extra = {"padding_mask": torch.arange(8)[None] > 6} if MASKED else {}
    torch.manual_seed(1)  # dropout must draw the same numbers when it runs again
    loss = model(tokens, tokens, mask, labels=tokens, loss_mask=torch.ones(1, 8),
                 packed_seq_params=params if packed else None, **extra)
    loss.sum().backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}, calls


def same(first, second):
    assert torch.equal(first[0], second[0])
    assert first[1].keys() == second[1].keys()
    for name, grad in first[1].items():
        assert torch.equal(grad, second[1][name]), name
"""
PATCHED = """
for packed in (False, True):
    plain, full = train(False, packed), train(True, packed)
    same(plain, full)
    assert len(plain[2]) == 2 and len(full[2]) == 4  # each once more in the backward
    for kwargs in full[2]:
        assert (kwargs["packed_seq_params"] is not None) == packed
        assert not MASKED or kwargs["padding_mask"].shape == (1, 8)
    assert any("mtp" in name and grad.abs().sum() > 0 for name, grad in full[1].items())
    same(plain, train(True, packed, method="block"))  # warns and does not recompute

# Like Transformer Engine's, this checkpoint follows only what is handed on by position.
if not MASKED:
    from megatron.core.extensions import transformer_engine

    def te_checkpoint(function, distribute, tracker, group, *args, **kwargs):
        return torch.utils.checkpoint.checkpoint(
            lambda *values: function(*values, **kwargs), *args, use_reentrant=True)

    @contextlib.contextmanager
    def nothing(*args, **kwargs):
        yield

    transformer_engine.te_checkpoint = te_checkpoint
    from megatron.core.transformer import multi_token_prediction

    multi_token_prediction.get_fp8_context = nothing
    layer = next(m for m in build(True).modules() if isinstance(m, MultiTokenPredictionLayer))
    layer.config.fp8 = "e4m3"
    hidden = torch.randn(8, 1, 16, requires_grad=True)
    out = layer._checkpointed_forward(
        layer._proj_and_transformer_layer, hidden_states=hidden, decoder_input=hidden.detach(),
        attention_mask=None, packed_seq_params=None)
    out.sum().backward()
    assert all(p.grad is not None for p in layer.parameters()) and hidden.grad is not None
"""
STOCK = """
path = STOCK + "/megatron/core/transformer/multi_token_prediction.py"
spec = importlib.util.spec_from_file_location("megatron.core.transformer.stock_mtp", path)
stock = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stock)
theirs = stock.MultiTokenPredictionLayer._checkpointed_forward
MultiTokenPredictionLayer._checkpointed_forward = theirs
for packed, raises in CASES:
    try:
        train(True, packed)
    except TypeError as error:
        assert raises in str(error), error
    else:
        assert not raises
print("done")
"""
CASES = {
    "0.16.1": [(False, ""), (True, "save_for_backward can only save variables")],
    "0.17.1": [(False, ""), (True, "save_for_backward can only save variables")],
    "0.18.2": [(False, "unexpected keyword argument 'padding_mask'")],
}


@pytest.mark.parametrize("version", CASES)
def test_recompute_changes_no_bit(version: str) -> None:
    given = (version == "0.18.2", CASES[version], str(pristine(version)))
    code = f"MASKED, CASES, STOCK = {given!r}\n" + TRAIN + PATCHED + STOCK
    done = python(patched(version, "mtp_full_recompute"), code)
    assert done.stdout.endswith("done\n"), done.stderr
