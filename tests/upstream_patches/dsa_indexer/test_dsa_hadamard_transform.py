"""DSA's indexer without the package fast_hadamard_transform."""

from types import SimpleNamespace

import pytest

from cppmega.catalogue import loader as catalogue
from tests.support import VERSIONS, patched, pristine, python

NAME = "dsa_hadamard_transform"
PATH = "megatron/core/transformer/experimental_attention_variant/dsa.py"

INDEXER = """
import importlib.util
from unittest import mock

import torch
from cppmega.proof import cpu_shims
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import MLATransformerConfig
from megatron.core.transformer.experimental_attention_variant import dsa

cpu_shims.init_distributed()
torch.manual_seed(0)


class Linear(torch.nn.Linear):
    def __init__(self, size_in, size_out, **ignored):
        super().__init__(size_in, size_out, bias=False, dtype=torch.bfloat16)

    def forward(self, x):
        return super().forward(x), None


class Norm(torch.nn.LayerNorm):
    def __init__(self, config, hidden_size, eps):
        super().__init__(hidden_size, eps, dtype=torch.bfloat16)


config = MLATransformerConfig(
    num_layers=1, hidden_size=64, num_attention_heads=2, add_bias_linear=False,
    bf16=True, params_dtype=torch.bfloat16,
    q_lora_rank=32, kv_lora_rank=32, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=16,
    rope_type="rope", rotary_base=10000, rotary_percent=1.0, apply_rope_fusion=False,
    experimental_attention_variant="dsa",
    dsa_indexer_n_heads=4, dsa_indexer_head_dim=32, dsa_indexer_topk=8,
)
indexer = dsa.DSAIndexer(
    config,
    dsa.DSAIndexerSubmodules(
        linear_wq_b=Linear, linear_wk=Linear, k_norm=Norm, linear_weights_proj=Linear
    ),
    ProcessGroupCollection.use_mpu_process_groups(),
)
hidden = torch.randn(24, 2, 64, dtype=torch.bfloat16)
latent = torch.randn(24, 2, 32, dtype=torch.bfloat16)


def scores():
    with mock.patch.object(dsa, "hadamard_transform", PACKAGE):
        return indexer.forward_with_scores(hidden, latent)[0]


def gradients(loss):
    loss.backward()
    found = [parameter.grad.clone() for parameter in indexer.parameters()]
    indexer.zero_grad()
    return found


PACKAGE = None  # as where the import failed
rotated = scores()
# The same rotation of queries and keys leaves their products as they are.
with mock.patch.object(dsa, "rotate_activation", lambda x: x):
    plain = scores()
weights = torch.randn_like(plain)
ours = [rotated, *gradients((rotated * weights).sum())]
theirs = [plain, *gradients((plain * weights).sum())]
for one, other in zip(ours, theirs):
    # bf16 roundings, some across the kink of the ReLU; an unrotated gradient is off by 1.4
    assert 0 < (one - other).norm() < 0.1 * other.norm(), (one, other)

# The package stays in use where it can be imported.
PACKAGE = mock.Mock(side_effect=lambda x, scale: x * scale)
assert scores().shape == (2, 24, 24) and PACKAGE.call_count == 2
assert {call.kwargs["scale"] for call in PACKAGE.call_args_list} == {32**-0.5}

# The unpatched function, in the same process.
spec = importlib.util.spec_from_file_location("stock_dsa", STOCK)
stock = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stock)
stock.hadamard_transform = None
with mock.patch.object(dsa, "rotate_activation", stock.rotate_activation):
    try:
        scores()
    except AssertionError as error:
        assert "fast_hadamard_transform" in str(error)
    else:
        raise SystemExit("stock ran without the package")
"""


# One text from 0.16 to 0.19; verify runs on the versions in between.
@pytest.mark.parametrize("version", [VERSIONS[0], VERSIONS[-1]])
def test_indexer_scores_and_gradients(version: str) -> None:
    stock = pristine(version) / PATH
    done = python(patched(version, NAME), f"STOCK = {str(stock)!r}\n{INDEXER}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "reached"),
    [
        ({"experimental_attention_variant": "dsa"}, True),
        ({"experimental_attention_variant": "dsa", "dsa_indexer_rotate_activation": False}, False),
        ({"experimental_attention_variant": None, "hybrid_layer_pattern": "ED|ED/D"}, True),
        ({"experimental_attention_variant": None, "hybrid_layer_pattern": "M*M-"}, False),
        ({}, False),
    ],
)
def test_when_a_run_must_reach_it(arguments: dict[str, object], reached: bool) -> None:
    page = catalogue.load()[NAME]
    assert page.patch.when is not None
    assert page.patch.when(SimpleNamespace(**arguments)) is reached
