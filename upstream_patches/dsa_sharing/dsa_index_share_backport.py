"""Let DSA layers attend to the keys that another layer selected, in releases before 0.19.

What: With `CPPMEGA_INDEX_CACHE=1` at apply, a Shared layer attends to the keys that its Full layer
    selected in the same forward pass, and has no indexer loss; `dsa_index_share` determines which
    layers are Shared, and builds them without an indexer. The keys are kept on an object that
    belongs to one microbatch's pass through a stack of layers. `tensor_parallel.checkpoint` and
    `te_checkpoint` bind their function to that object, so that a recomputed layer, Full or Shared,
    attends to the keys of its own forward pass, whatever ran in between. The object is released
    together with the autograd graph of its microbatch, or, if nothing is recomputed, at the end of
    the stack. MTP depths share nothing. CUDA graphs of attention layers and the schedule of
    `--overlap-moe-expert-parallel-comm` are refused, since neither calls a stack (from 0.19 on,
    `dsa_index_share_holder` finds the keys of captured layers). Selective
    recomputation of the attention (`core_attn`) is not possible here: in these releases it omits
    arguments that DSA needs.
Why: In 0.16 to 0.18 every DSA layer runs an indexer, and no layer can use the selection of another
    one. If a third of NAM56R's DSA layers are Full, the other six need neither the indexer's
    weights nor its scores of all keys.
Upstream: Not sent: 0.19.0 rewrote the layers, and there they can share keys.
Remove: when the oldest supported release is 0.19.
Numerics: changes results: Shared layers attend to the keys of a Full layer. A model whose DSA
    layers are all Full computes the same as before (bitwise). A Full layer that is recomputed
    computes the gradient of its sparse loss over keys that it selects again, as it does without
    sharing.
"""

from __future__ import annotations

from typing import Any

from cppmega.catalogue.megatron_args import uses_dsa
from cppmega.edits import in_order, inserting, replacing
from cppmega.page import Edit, Patch, Source
from cppmega.rules.combinations import (
    SHARED_KEYS,
    SHARED_KEYS_IN_GRAPHS,
    SHARED_KEYS_OUTSIDE_STACKS,
)
from cppmega.rules.rule import unsupported

from ._dsa_forward import BINDS, BOUND, BOUND_BY_TE, OPENED_BY_BLOCK, OPENED_BY_STACK, OPENS

DSA = "megatron/core/transformer/experimental_attention_variant/dsa.py:DSAttention"
LAYER = f"{DSA}.forward"

ATTENDS = "output = unfused_dsa_fn(query, key, value, topk_indices, self.softmax_scale)"
SHARED = """
if self.indexer is None:
    topk_indices = _cppmega_keys()[self.source_layer]
    return unfused_dsa_fn(query, key, value, topk_indices, self.softmax_scale)
"""
KEPT = f"""
if getattr(self, "index_share", False):  # recomputed: it keeps to the keys of its forward
    topk_indices = _cppmega_keys().setdefault(self.layer_number, topk_indices)
{ATTENDS}
"""
FROM_INPUTS = inserting(SHARED, after="qr = qr.detach()")


def _cppmega_keys():
    """The keys that Full layers chose in this forward, by layer number."""
    from cppmega.features.dsa.forward import current

    return vars(current()).setdefault("dsa_keys", {})


PATCH = Patch(
    purpose="feature",
    edits=(
        Edit(
            target=LAYER,
            pins={"0.16.1": "1a94be7b8a955f97"},
            edit=in_order(FROM_INPUTS, replacing(ATTENDS, KEPT)),
            helpers=(_cppmega_keys,),
        ),
        # Training and evaluation compute the attention in two different places.
        Edit(
            target=LAYER,
            pins={"0.17.1": "e97cdc0c18dcc2d5", "0.18.2": "e97cdc0c18dcc2d5"},
            edit=in_order(FROM_INPUTS, replacing(ATTENDS, KEPT, times=2)),
            helpers=(_cppmega_keys,),
        ),
        Edit(
            target="megatron/core/transformer/transformer_block.py:TransformerBlock.forward",
            pins={
                "0.16.1": "1c0b4313c2591c41",
                "0.17.1": "15c36c30fc5de051",
                "0.18.2": "8bd5c18f5fb96ca1",
            },
            edit=OPENED_BY_BLOCK,
            imports=OPENS,
            mark="",  # models without DSA run this, too
        ),
        Edit(
            target="megatron/core/models/hybrid/hybrid_block.py:HybridStack.forward",
            pins={"0.18.2": "50ac5b73f74c7aa0"},
            edit=OPENED_BY_STACK,
            imports=OPENS,
            mark="",
        ),
        Edit(
            target="megatron/core/tensor_parallel/random.py:checkpoint",
            pins={
                "0.16.1": "4ee6b6ead413019c",
                "0.17.1": "ce90b11a1c95e18c",
                "0.18.2": "92de7aacdf933d8c",
            },
            edit=BOUND,
            imports=BINDS,
            mark="",
        ),
        Edit(
            target="megatron/core/extensions/transformer_engine.py:te_checkpoint",
            pins={
                "0.16.1": "23886b0d89555be2",
                "0.17.1": "23886b0d89555be2",
                "0.18.2": "23886b0d89555be2",
            },
            edit=BOUND_BY_TE,
            imports=BINDS,
            mark="",
        ),
    ),
    reached="forward",
    when=uses_dsa,
    feature=("megatron/core/transformer/experimental_attention_variant/dsa.py:DSAttention",),
    rules=unsupported(SHARED_KEYS, {**SHARED_KEYS_IN_GRAPHS, **SHARED_KEYS_OUTSIDE_STACKS}),
    gate="CPPMEGA_INDEX_CACHE",
    wanted_by=lambda recipe: bool(recipe.dsa_index_pattern),
    after=("dsa_dense_loss_warmup", "dsa_indexer_kernels", "dsa_indexer_loss_off"),
)


def fixed_upstream(source: Source) -> bool:
    return "source_layer" in source.text(LAYER)


def verify() -> None:
    from megatron.core.transformer.experimental_attention_variant import dsa

    from cppmega.proof import small_models

    from ._dsa_forward_proof import (
        RECOMPUTED,
        assert_bound_by_te,
        assert_kept,
        assert_released,
        keys_used,
    )

    def used(**options: Any) -> dict[str, list[list[Any]]]:
        gpt = small_models.gpt(num_layers=2, **options)
        found = keys_used(gpt, dict(zip(("L1", "L2"), gpt.decoder.layers, strict=True)))
        assert found["L1"] == found["L2"], "not shared"
        return found

    assert len(used()["L1"]) == 2
    if hasattr(dsa.DSAttention, "_get_index_share_carrier"):
        return  # from 0.19 on, dsa_index_share_holder keeps them for a recomputation
    assert_kept(used(**RECOMPUTED))
    hybrid = small_models.hybrid(**RECOMPUTED)
    if type(hybrid).__name__ == "HybridModel":  # up to 0.17, hybrid models have no DSA layers
        assert_kept(keys_used(hybrid, {"H1": hybrid.decoder.layers[0]}))
    assert_released()
    assert_bound_by_te()
