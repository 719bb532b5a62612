"""A layer of DSA's attention on the CPU, with a core that is plain attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ABSORBED = "megatron.core.transformer.experimental_attention_variant.absorbed_mla"
SHAPE = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "q_lora_rank": 8,
    "kv_lora_rank": 6,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 4,
}


def built(module: Any, projection: type, recompute: str = "") -> Any:
    """A layer of DSA's attention.

    Args:
        module: the patched `absorbed_mla` or stock's.
        projection: the type of the projections that need Transformer Engine.
        recompute: of the up projection: `fp8`, `fp4`, another word for neither, or nothing.
    """
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    config = MLATransformerConfig(
        num_layers=1,
        use_cpu_initialization=True,
        add_bias_linear=False,
        rope_type="rope",
        recompute_granularity="selective" if recompute else None,
        recompute_modules=["mla_up_proj"] if recompute else None,
        **SHAPE,
    )
    config.fp8 = "hybrid" if recompute == "fp8" else None
    config.fp4 = "e2m1" if recompute == "fp4" else None
    linears = dict.fromkeys(("q_proj", "q_up_proj", "kv_up_proj", "proj"), projection)
    linears |= dict.fromkeys(("q_down_proj", "kv_down_proj"), ColumnParallelLinear)
    parts = module.AbsorbedMLASelfAttentionSubmodules(
        **{f"linear_{name}": kind for name, kind in linears.items()},
        core_attention=core(),
        q_layernorm=IdentityOp,
        kv_layernorm=IdentityOp,
    )
    return module.AbsorbedMLASelfAttention(
        config, parts, layer_number=1, attn_mask_type=AttnMaskType.causal
    )


def linear(of: Callable[[Any], Any] = lambda value: value) -> type:
    """A projection that multiplies what a function makes of its input and its weight."""
    import torch

    class Linear(torch.nn.Linear):
        def __init__(self, inputs: int, outputs: int, **_: Any) -> None:
            super().__init__(inputs, outputs, bias=False)

        def forward(self, x: Any) -> Any:
            return torch.nn.functional.linear(of(x), of(self.weight)), None

    return Linear


def core() -> type:
    import torch

    class Core(torch.nn.Module):
        """Attention with one compressed key for all heads, whose first channels are the value."""

        def __init__(self, **_: Any) -> None:
            super().__init__()

        def forward(self, query: Any, key: Any, *_: Any, **__: Any) -> Any:
            weights = torch.einsum("snh,tnh->nst", query[:, 0], key[:, 0].expand_as(query[:, 0]))
            value = key[:, 0, 0, : SHAPE["kv_lora_rank"]]
            attended = torch.einsum("nst,th->snh", weights.tril().softmax(-1), value)
            return attended.flatten(1).unsqueeze(1)

    return Core
