"""Allow FP8 and FP4 when the up projection of DSA's attention is recomputed.

What: `AbsorbedMLASelfAttention` no longer rejects `--recompute-modules mla_up_proj` together with
    `--fp8-format` or `--fp4-format`.
Why: The first forward pass of such a run fails with `AssertionError: FP8/FP4 is not supported for
    AbsorbedMLA`, although every other MLA layer supports the combination. Nothing is missing: the
    only quantized product inside is the up projection of the query, the checkpoint already receives
    the quantization and replays it under the recipe of the forward pass, and the absorbed weight is
    a parameter, the same in both passes. DSA has used this class since 0.19.
Upstream: https://github.com/NVIDIA/Megatron-LM/pull/6178 (dev, August 2026; not released)
Remove: when `get_query_key_value_tensors` no longer asserts that there is no quantization.
Numerics: none (bitwise); such runs used to fail
"""

from typing import Any

from cppmega.catalogue.megatron_args import absorbs_dsa, recomputes
from cppmega.edits import replacing
from cppmega.page import Edit, Patch, Source

CLASS = (
    "megatron/core/transformer/experimental_attention_variant/absorbed_mla.py:"
    "AbsorbedMLASelfAttention"
)
TARGET = f"{CLASS}.get_query_key_value_tensors"


def recomputes_quantized(args: Any) -> bool:
    """Whether the run's DSA layers recompute their up projection in FP8 or FP4."""
    quantized = bool(getattr(args, "fp8", None) or getattr(args, "fp4", None))
    return quantized and absorbs_dsa(args) and recomputes(args, "mla_up_proj")


PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=TARGET,
            pins={"0.19.2": "4296584ee8e943f5", "main-d98e8a64": "a8820ea6f3010c75"},
            edit=replacing(
                'assert not quantization, "FP8/FP4 is not supported for AbsorbedMLA"', ""
            ),
        ),
    ),
    reached="forward",
    # Up to 0.18 no Megatron model uses this attention, which has two up projections there.
    feature=(f"{CLASS}._get_kv_up_weights",),
    when=recomputes_quantized,
)


def fixed_upstream(source: Source) -> bool:
    text = source.text(TARGET)
    return "CheckpointWithoutOutput(fp8=quantization)" in text and "not quantization" not in text


def verify() -> None:
    from types import SimpleNamespace
    from unittest import mock

    import torch
    from megatron.core.transformer.experimental_attention_variant import absorbed_mla

    asked = []

    class Checkpoint:
        """The real one needs Transformer Engine for a quantization."""

        def __init__(self, fp8=None):  # type: ignore[no-untyped-def]
            asked.append(fp8)

        def checkpoint(self, function, *args):  # type: ignore[no-untyped-def]
            return function(*args)

    def tensors(**given):  # type: ignore[no-untyped-def]
        """Return query and key of a layer with one head, each part two channels wide."""
        layer = absorbed_mla.AbsorbedMLASelfAttention.__new__(absorbed_mla.AbsorbedMLASelfAttention)
        torch.nn.Module.__init__(layer)
        widths = dict.fromkeys(("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim"), 2)
        config = {"q_lora_rank": None, "v_head_dim": 2, "rope_type": "rope", "fp8": None}
        flags = dict.fromkeys(("apply_rope_fusion", "sequence_parallel", "fp4"), False)
        layer.config = SimpleNamespace(**(widths | config | flags | given), context_parallel_size=1)
        layer.num_attention_heads_per_partition, layer.q_head_dim = 1, 4
        layer.rotary_pos_emb = mock.Mock(return_value=torch.zeros(3, 1, 1, 2))
        layer.pg_collection, layer.tp_group = SimpleNamespace(cp=None, tp=None), None
        layer.recompute_up_proj, layer.cache_mla_latents = bool(given), False
        layer.kv_layernorm = torch.nn.Identity()
        layer.linear_kv_down_proj = layer.linear_q_proj = lambda hidden: (hidden, None)
        layer._uses_combined_kv_up_projection = True  # a property of the layer on dev
        layer.linear_kv_up_proj = torch.nn.Linear(2, 4, bias=False).requires_grad_(False)
        layer.linear_kv_up_proj.weight.copy_(torch.arange(8.0).view(4, 2))
        return layer.get_query_key_value_tensors(torch.arange(12.0).view(3, 1, 4))

    turn = mock.patch.object(absorbed_mla, "apply_rotary_pos_emb", lambda part, *_, **__: part)
    parallel = SimpleNamespace(CheckpointWithoutOutput=Checkpoint)
    with turn, mock.patch.object(absorbed_mla, "tensor_parallel", parallel):
        plain = tensors()
        for given in ({"fp8": "hybrid"}, {"fp4": "e2m1"}):
            for ours, wanted in zip(tensors(**given), plain, strict=True):
                assert torch.equal(ours, wanted)
        assert asked == ["hybrid", "e2m1"], f"the recomputation is not quantized: {asked}"
