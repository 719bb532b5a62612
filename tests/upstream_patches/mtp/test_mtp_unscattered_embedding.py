"""MTP with sequence parallelism on two ranks, with and without a scattering embedding."""

from __future__ import annotations

import pytest

from tests.support import VERSIONS, patched, pristine, python

PAGE = "mtp_unscattered_embedding"

CODE = """
from types import SimpleNamespace

import torch
from cppmega.proof import cpu_shims

cpu_shims.init_distributed(tensor=2)
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

group = parallel_state.get_tensor_model_parallel_group()
config = TransformerConfig(
    num_layers=1, hidden_size=6, num_attention_heads=2, hidden_dropout=0.0,
    sequence_parallel=True, tensor_model_parallel_size=2, use_cpu_initialization=True,
)
config.mtp_detach_heads = False
layer = SimpleNamespace(config=config, cp_group=None, enorm=torch.nn.Identity(),
                        hnorm=torch.nn.Identity())
if VERSION > "0.17":
    layer.tp_group = group
ids = torch.arange(8).view(1, 8)


def built(scatters):
    torch.manual_seed(0)
    return LanguageModelEmbedding(
        config, 16, 8, position_embedding_type="rope", scatter_to_sequence_parallel=scatters,
        tp_group=group,
    )


def concatenated(embedding):
    hidden = torch.zeros(4, 1, 6)  # this rank's half of the sequence
    *_, decoder_input, hidden = MultiTokenPredictionLayer._get_embeddings(
        layer, input_ids=ids, position_ids=ids, hidden_states=hidden, embedding=embedding
    )
    return torch.cat((decoder_input, hidden), -1)


def outcome(scatters):
    embedding = built(scatters)
    found = concatenated(embedding)
    weight = torch.arange(1.0, found.numel() + 1).view_as(found) * (1 + group.rank())
    (found * weight).sum().backward()
    return found.detach(), embedding.word_embeddings.weight.grad


if PATCHED:
    for ours, theirs in zip(outcome(False), outcome(True), strict=True):
        assert torch.equal(ours, theirs)
else:
    outcome(True)
    try:
        outcome(False)
    except RuntimeError as error:
        assert "Sizes of tensors must match" in str(error), error
        print(error)
    else:
        raise SystemExit("stock concatenated them")
"""


# The layer got its group in 0.17.
@pytest.mark.megatron
@pytest.mark.parametrize("version", [VERSIONS[0], VERSIONS[-1]])
def test_on_two_ranks(version: str) -> None:
    for root, is_patched in ((patched(version, PAGE), True), (pristine(version), False)):
        code = f"VERSION, PATCHED = {version!r}, {is_patched}\n" + CODE
        done = python(root, code, nproc=2)
        assert done.returncode == 0, done.stderr
