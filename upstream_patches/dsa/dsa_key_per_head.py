"""Give DSA's attention a key per head, where sequences are not much longer than the top-k.

What: With `CPPMEGA_DSA_KEY_PER_HEAD=1` at apply, DSA layers are built as Megatron's
    `MLASelfAttention` and not as `AbsorbedMLASelfAttention`: latents are projected up to keys and
    values of every head, as in MLA, and the kernels of `dsa_attention_kernels` multiply all tiles
    in which a query chose a key. Layers have the same parameters in the same layout, so that
    checkpoints can be exchanged. The backends tilelang and cudnn, heads wider than 256 columns,
    and sequences of more than four times the top-k, for which this is estimated to be slower, are
    refused.
Why: In absorbed form, queries, keys and outputs are as wide as the latents, 576 and 512 columns in
    DeepSeek-V3.2, in place of 192 and 128. That saves work where a query sees many more keys than
    it chooses. At sequence length 4096 and a top-k of 2048, a query sees 2048 keys on average and
    chooses 1536: for 128 heads on an H200, attention with its gradients takes 23.4 ms absorbed and
    9.9 with a key per head, and the indexer's loss 10.9 and 6.5 (`dsa_key_per_head_h200`).
Upstream: Not sent: upstream would have to choose the class by the length of sequences.
Remove: when Megatron builds DSA layers without absorption where that is faster.
Numerics: reorders sums
"""

from __future__ import annotations

from typing import Any

from cppmega.catalogue.megatron_args import uses_dsa
from cppmega.edits import replacing
from cppmega.host import env
from cppmega.page import Edit, Patch, Source
from cppmega.rules.rule import Part, unsupported

SPEC = (
    "megatron/core/models/gpt/experimental_attention_variant_module_specs.py:"
    "get_dsa_module_spec_for_backend"
)
STACK = "megatron/core/models/hybrid/hybrid_block.py:HybridStack.__init__"
ABSORBED = (
    "megatron/core/transformer/experimental_attention_variant/absorbed_mla.py:"
    "AbsorbedMLASelfAttention.forward"
)
GATE = env.DSA_KEY_PER_HEAD.name
IMPORTS = ("from cppmega.features.dsa import key_per_head as _cppmega_key_per_head",)
LONGEST = 4
"""Times the top-k that a sequence may be long."""


def _other_backend(run: Any) -> str:
    backend = run.dsa_kernel_backend or "none"
    return "" if backend == "none" else f"--dsa-kernel-backend {backend}"


def _too_wide(run: Any) -> str:
    from cppmega.ops.dsa_attention import per_head_obstacle  # imports torch

    keys, values = (run.qk_head_dim or 0) + (run.qk_pos_emb_head_dim or 0), run.v_head_dim or 0
    refused = per_head_obstacle(keys, values) is not None
    return f"heads of {max(keys, values)} columns" if refused else ""


def _too_long(run: Any) -> str:
    length, topk = run.seq_length or 0, run.dsa_indexer_topk or 0
    return f"sequences of {length} with a top-k of {topk}" if length > LONGEST * topk else ""


UNSET = f"unset {GATE} and apply again"
OWN = Part(GATE, uses_dsa, UNSET)

PATCH = Patch(
    purpose="feature",
    edits=(
        Edit(
            target=SPEC,
            pins={"0.19.2": "b0643676e09c402c"},
            edit=replacing(
                "return attention", "return _cppmega_key_per_head.layer_spec(attention)"
            ),
            imports=IMPORTS,
        ),
        Edit(
            target=STACK,
            pins={"0.19.2": "1008fcf6068c752f"},
            edit=replacing(
                "submodules.dsa_layer", "_cppmega_key_per_head.layer_spec(submodules.dsa_layer)"
            ),
            imports=IMPORTS,
        ),
    ),
    reached="startup",
    feature=(ABSORBED,),
    when=uses_dsa,
    gate=GATE,
    after=("dsa_index_share_checkpoints", "mhc_connections", "own_mixers"),
    rules=unsupported(
        OWN,
        {
            Part("{}", _other_backend, "--dsa-kernel-backend none"): (
                "Its kernels take one latent key for all heads."
            ),
            Part("{}", _too_wide, "at most 256 columns"): "No kernel supports them.",
            Part("{}", _too_long, f"at most {LONGEST} times the top-k"): (
                "All keys that a query sees are multiplied, which by estimate takes longer than to "
                "gather the chosen ones."
            ),
        },
    ),
)


def fixed_upstream(source: Source) -> bool:
    return "MLASelfAttention" in source.text(SPEC).replace("AbsorbedMLASelfAttention", "")


def verify() -> None:
    from dataclasses import replace

    import torch
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.experimental_attention_variant import dsa
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    from cppmega.proof.small_models import Norm, Projection, dsa_attention

    class Backend(LocalSpecProvider):
        def linear(self) -> type:
            return ColumnParallelLinear

    absorbed = dsa_attention()
    spec = variants.get_dsa_module_spec_for_backend(absorbed.config, Backend())
    assert spec.module is MLASelfAttention, "a GPT's DSA layers are absorbed"
    spec.submodules.core_attention.submodules.indexer.submodules = dsa.DSAIndexerSubmodules(
        Projection, Projection, Norm, Projection
    )
    absorbing = replace(spec, module=type(absorbed))
    layer = ModuleSpec(
        TransformerLayer, submodules=TransformerLayerSubmodules(self_attention=absorbing)
    )
    stack = hybrid_block.HybridStack(
        absorbed.config,
        hybrid_block.HybridStackSubmodules(dsa_layer=layer),
        layer_type_list=["D"],
        post_layer_norm=False,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    built = stack.layers[0].self_attention
    assert type(built) is MLASelfAttention, "a hybrid model's DSA layers are absorbed"
    built.load_state_dict(absorbed.state_dict())
    x = torch.randn(12, 2, absorbed.config.hidden_size, requires_grad=True)
    upstream = torch.randn_like(x)
    results = []
    for attention in (built, absorbed):
        output, _ = attention(x, None)
        weights = attention.linear_q_up_proj.weight, attention.linear_kv_up_proj.weight
        results.append((output, *torch.autograd.grad(output, (x, *weights), upstream)))
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other)
