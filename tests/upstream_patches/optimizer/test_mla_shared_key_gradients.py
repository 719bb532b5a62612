"""Two tensor-parallel ranks have the gradients of one, and by stock's code they do not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cppmega.catalogue import loader as catalogue
from tests.support import VERSIONS, patched, pristine, python

torch = pytest.importorskip("torch")

PAGE = "mla_shared_key_gradients"

CODE = """
import torch
from cppmega.proof import ranks, small_models


def gradients(rank, of=2):
    layer = small_models.mla_attention(tensor_model_parallel_size=of)
    torch.manual_seed(1)
    hidden = torch.randn(4, 1, 32, requires_grad=True)
    upstream = torch.randn(4, 1, 4, 24).chunk(of, dim=2)[rank]
    layer.get_query_key_value_tensors(hidden)[1].backward(upstream)
    return hidden.grad, layer.linear_kv_down_proj.weight.grad, layer.linear_kv_up_proj.weight.grad


two = ranks.on_two(gradients)
(hidden, *weights) = gradients(0, of=1)
same = [torch.allclose(one, other, rtol=1e-4, atol=1e-5) for one, other in (
    *((hidden, mine[0]) for mine in two),
    *zip(weights, map(torch.cat, list(zip(*two))[1:])),
)]
print(same)
"""


@pytest.mark.megatron
@pytest.mark.parametrize("version", [VERSIONS[0], VERSIONS[-1]])
def test_two_ranks_have_the_gradients_of_one(version: str) -> None:
    done = python(patched(version, PAGE), CODE)
    assert done.stdout.endswith("[True, True, True, True]\n"), done.stdout + done.stderr
    done = python(pristine(version), CODE)
    assert done.stdout.endswith("[False, False, False, True]\n"), done.stdout + done.stderr


def test_runs_that_divide_heads_must_reach_it() -> None:
    when = catalogue.load()[PAGE].patch.when
    run = {"multi_latent_attention": True, "tensor_model_parallel_size": 2}
    assert when is not None and when(SimpleNamespace(**run))
    for other in (
        {"multi_latent_attention": False},
        {"tensor_model_parallel_size": 1},
        {"hybrid_layer_pattern": "M*-M*-"},
    ):
        assert not when(SimpleNamespace(**run | other))
    assert when(SimpleNamespace(**run, hybrid_layer_pattern="M+-M*-"))
