"""A small hybrid stack on the CPU, of any version: Mamba layers with a plain mixer, and attention.

Imported in the process that runs a tree, never by pytest itself.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from megatron.core.fusions import fused_softmax
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.tensor_parallel import random
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from cppmega.proof import cpu_shims

try:
    from megatron.core.models.hybrid.hybrid_block import HybridStack as Stack
    from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules as Submodules
except ImportError:
    from megatron.core.ssm.mamba_block import MambaStack as Stack
    from megatron.core.ssm.mamba_block import MambaStackSubmodules as Submodules

WIDTH = 8
PATTERN = "MM*M*M"


def start() -> None:
    """Replace what these layers need from a GPU."""
    cpu_shims.init_distributed()
    mock.patch.object(random, "_get_cuda_rng_state", return_value=None).start()
    mock.patch.object(random, "_set_cuda_rng_state").start()
    fused_softmax.get_default_causal_mask = lambda n: torch.ones(n, n).triu(1).bool()


class Mixer(torch.nn.Linear):
    """Replaces the selective scan, with a dropout that recomputation must replay."""

    def __init__(self, config: Any, d_model: int, **ignored: Any) -> None:
        super().__init__(d_model, d_model)

    def forward(self, x: Any, inference_context: Any = None, packed_seq_params: Any = None) -> Any:
        out = torch.nn.functional.dropout(super().forward(x).tanh(), 0.2, self.training)
        return (out if packed_seq_params is None else 2 * out), None


class Attention(DotProductAttention):
    """The CPU's attention, which rejects packed sequences; here it attends to all of them."""

    def forward(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Norm(torch.nn.LayerNorm):
    """A norm with the arguments of any version."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size)


def build(is_mtp_layer: bool = False, **given: Any) -> Any:
    """Build a stack of `PATTERN`."""
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=len(PATTERN),
        hidden_size=WIDTH,
        num_attention_heads=2,
        use_cpu_initialization=True,
        hidden_dropout=0.1,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        **given,
    )
    attention = gpt_layer_specs.get_gpt_layer_local_spec()
    attention.submodules.self_attention.submodules.core_attention = Attention
    parts = MambaLayerSubmodules(norm=Norm, mixer=Mixer, mamba_bda=get_bias_dropout_add)
    submodules = Submodules(
        mamba_layer=ModuleSpec(MambaLayer, submodules=parts), attention_layer=attention
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    common = {"post_layer_norm": False, "pg_collection": groups}
    try:
        return Stack(
            config, submodules, layer_type_list=list(PATTERN), is_mtp_layer=is_mtp_layer, **common
        )
    except TypeError:  # 0.16 splits the pattern by itself
        return Stack(config, submodules, hybrid_override_pattern=PATTERN, **common)


def train(stack: Any, needs_grad: bool = True, **given: Any) -> tuple[list[int], list[Any]]:
    """Return how often each layer ran in a training step, the output, and all gradients."""
    calls = [0] * len(PATTERN)

    def count(layer: Any) -> Any:
        at = list(stack.layers).index(layer)

        def hook(*ignored: Any) -> None:
            calls[at] += 1

        return hook

    for layer in stack.layers:
        inner = layer.mixer if isinstance(layer, MambaLayer) else layer.self_attention
        inner.register_forward_pre_hook(count(layer))
    torch.manual_seed(1)
    x = torch.randn(4, 2, WIDTH, requires_grad=needs_grad)
    out = stack(x, torch.ones(1, 1, 4, 4).triu(1).bool(), **given)
    out.square().sum().backward()
    grads = [p.grad for p in ([x] if needs_grad else []) + list(stack.parameters())]
    return calls, [out.detach(), *grads]


def same(first: list[Any], second: list[Any]) -> bool:
    """Whether the tensors are bitwise equal."""
    return len(first) == len(second) and all(
        torch.equal(a, b) for a, b in zip(first, second, strict=True)
    )
