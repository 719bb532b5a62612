"""Bind the keys that DSA layers share to the forward pass that selected them.

What: With `--dsa-indexer-topk-freq` above 1, a Shared layer uses the keys that a Full layer
    selected. They are kept on an object that belongs to one microbatch's pass through a stack of
    layers, or through an MTP depth. `tensor_parallel.checkpoint` and `te_checkpoint`, the only
    functions that recompute attention, bind their function to that object: a recomputed layer, Full
    or Shared, attends to the keys of its own forward pass, in whatever order layers are recomputed.
    The object is released together with the autograd graph of its microbatch, or, if nothing is
    recomputed, at the end of the stack. A depth finds the keys of the depths before it, with
    upstream's numbering for GPT models, and not those of the decoder: on the dev branch, which
    continues the decoder's numbers, a depth that shares with a decoder layer raises the error for a
    Full layer that did not run. The schedule of `--overlap-moe-expert-parallel-comm`, which does
    not call a stack, is refused. CUDA graphs capture layers one by one, without calling a stack,
    with `--cuda-graph-impl` local and transformer_engine: a layer that is captured reads the keys
    that the latest capture of its Full layer writes, in memory that no later graph may reuse. Every
    microbatch in flight has graphs of its own, and so keys of its own. Over 50 steps of NAM56R's
    slice with three Full and six Shared layers on an H200, all losses with either kind of graphs
    are within the noise of two runs without (benchmarks/results/dsa_sharing_graph_slices_h200.md).
    Local graphs of parts of layers (`--cuda-graph-modules attn`) hold the attention of dense layers
    and not that of MoE layers, so a GPT model that has both is refused. Recomputation keeps the
    indices of each Full layer for every microbatch in flight. A Full layer that is recomputed
    computes the gradient of its sparse loss over keys that it selects again, as it does without
    sharing.
Why: Stock attaches the keys to the packed-sequence parameters, to the attention mask or, without
    either, to the configuration of the model. Without a mask, as in most training, a layer that is
    recomputed uses the keys of the latest forward pass, so with a second microbatch in between
    (pipeline stages, or evaluation) gradients are wrong, without an error. With a mask, the
    recomputation receives a different tensor and stops with a RuntimeError. Layers of MTP depths
    are numbered from 1 again and overwrite the keys of the decoder's first layers, so one
    microbatch is enough. The last keys stay on the configuration indefinitely, and no others do:
    with several microbatches in CUDA graphs, those that earlier graphs read are freed, and later
    graphs may use their memory. All of this was seen on CPU with GPT and hybrid models.
Upstream: https://github.com/NVIDIA/Megatron-LM/pull/6793 (open)
Remove: when the keys that layers share are kept separately for each forward pass, MTP depths
    included.
Numerics: changes results: gradients are those of the keys that the forward pass used. Outputs do
    not change, nor do gradients where stock is correct: without recomputation, or with one
    microbatch at a time, no MTP depths, and a reproducible selection (bitwise).
"""

from __future__ import annotations

from cppmega.catalogue.megatron_args import shares_dsa_keys
from cppmega.edits import body_of, in_order, inserting, replacing
from cppmega.page import Edit, Patch, Source
from cppmega.rules.combinations import SHARED_KEYS, SHARED_KEYS_OUTSIDE_STACKS
from cppmega.rules.rule import unsupported

from ._dsa_forward import BINDS, BOUND, BOUND_BY_TE, OPENED_BY_BLOCK, OPENED_BY_STACK, OPENS

DSA = "megatron/core/transformer/experimental_attention_variant/dsa.py:DSAttention"
CARRIER = f"{DSA}._get_index_share_carrier"
MTP = "megatron/core/transformer/multi_token_prediction.py:MultiTokenPredictionBlock.forward"
DEPTHS = ("from cppmega.features.dsa.forward import Depths as _CppmegaDepths",)


def _get_index_share_carrier(self, packed_seq_params, attention_mask):
    from cppmega.features.dsa.forward import current

    return current()


KEPT = """
if self.layer_number in topk_holder.maps[0]:  # recomputed: it keeps to the keys of its forward
    topk_indices = topk_holder[self.layer_number]
    topk_length = topk_length_holder.maps[0].get(self.layer_number)
topk_holder[self.layer_number] = topk_indices
"""
OWN_FORWARD = in_order(
    inserting(
        "cppmega_depths = _CppmegaDepths()",
        before="offset = get_mtp_layer_offset(self.config, self.vp_stage)",
    ),
    replacing("self.layers[layer_idx]", "cppmega_depths.next(self.layers[layer_idx])"),
)
# On the dev branch, a depth is also used for its last norm.
AFTER_NORM = in_order(
    replacing("self.layers[layer_idx]._postprocess", "cppmega_depth._postprocess"),
    OWN_FORWARD,
    inserting(
        "cppmega_depth = self.layers[layer_idx]",
        after="layer_idx = 0 if self.mtp_use_repeated_layer else iteration",
    ),
)


PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=CARRIER,
            pins={
                "0.19.2": "35322e5f1f848140",
                "main-d98e8a64": "35322e5f1f848140",
                "dev-d48bd6be": "35322e5f1f848140",
                "0.19.0": "35322e5f1f848140",
            },
            edit=body_of(_get_index_share_carrier),
        ),
        Edit(
            target=f"{DSA}._get_index_share_topk_holder",
            pins={
                "0.19.2": "f6a79fffd63502fc",
                "main-d98e8a64": "f6a79fffd63502fc",
                "dev-d48bd6be": "f6a79fffd63502fc",
                "0.19.0": "f6a79fffd63502fc",
            },
            edit=replacing("holder = {}", "holder = carrier.holder(self._HOLDER_ATTR)"),
            mark="",  # it calls the method for the carrier
        ),
        Edit(
            target=f"{DSA}._get_index_share_topk_length_holder",
            pins={
                "0.19.2": "9e9170107414084d",
                "main-d98e8a64": "9e9170107414084d",
                "dev-d48bd6be": "9e9170107414084d",
                "0.19.0": "9e9170107414084d",
            },
            edit=replacing("holder = {}", "holder = carrier.holder(self._LENGTH_HOLDER_ATTR)"),
            mark="",
        ),
        Edit(
            target=f"{DSA}.forward",
            pins={
                "0.19.2": "bc3bc02b6b7ddf0c",
                "main-d98e8a64": "bc3bc02b6b7ddf0c",
                "dev-d48bd6be": "eb952f1eec56daa5",
                "0.19.0": "bc3bc02b6b7ddf0c",
            },
            edit=replacing("topk_holder[self.layer_number] = topk_indices", KEPT),
            mark="",
        ),
        Edit(
            target="megatron/core/transformer/transformer_block.py:TransformerBlock.forward",
            pins={
                "0.19.2": "8bd5c18f5fb96ca1",
                "main-d98e8a64": "dddd6e7c7dc03940",
                "dev-d48bd6be": "c7a658a3eec64311",
                "0.19.0": "8bd5c18f5fb96ca1",
            },
            edit=OPENED_BY_BLOCK,
            imports=OPENS,
            mark="",  # models without DSA run this, too
        ),
        Edit(
            target="megatron/core/models/hybrid/hybrid_block.py:HybridStack.forward",
            pins={
                "0.19.2": "50ac5b73f74c7aa0",
                "main-d98e8a64": "50ac5b73f74c7aa0",
                "dev-d48bd6be": "edfdf11c3ea33a4e",
                "0.19.0": "50ac5b73f74c7aa0",
            },
            edit=OPENED_BY_STACK,
            imports=OPENS,
            mark="",
        ),
        Edit(
            target=MTP,
            pins={
                "0.19.2": "a84af2ded90d3f89",
                "main-d98e8a64": "0efa4646a6494f4c",
                "0.19.0": "6e08bac0e7079025",
            },
            edit=OWN_FORWARD,
            imports=DEPTHS,
            mark="",
        ),
        Edit(
            target=MTP,
            pins={"dev-d48bd6be": "8e7e9d743deef6f1"},
            edit=AFTER_NORM,
            imports=DEPTHS,
            mark="",
        ),
        Edit(
            target="megatron/core/tensor_parallel/random.py:checkpoint",
            pins={
                "0.19.2": "92de7aacdf933d8c",
                "main-d98e8a64": "92de7aacdf933d8c",
                "dev-d48bd6be": "92de7aacdf933d8c",
                "0.19.0": "92de7aacdf933d8c",
            },
            edit=BOUND,
            imports=BINDS,
            mark="",
        ),
        Edit(
            target="megatron/core/extensions/transformer_engine.py:te_checkpoint",
            pins={
                "0.19.2": "23886b0d89555be2",
                "main-d98e8a64": "23886b0d89555be2",
                "dev-d48bd6be": "23886b0d89555be2",
                "0.19.0": "23886b0d89555be2",
            },
            edit=BOUND_BY_TE,
            imports=BINDS,
            mark="",
        ),
    ),
    reached="forward",
    when=shares_dsa_keys,
    feature=(
        "megatron/core/transformer/experimental_attention_variant/dsa.py:source_dsa_compute_layer",
    ),
    after=("dsa_indexer_kernels", "dsa_backend_limits"),
    rules=unsupported(SHARED_KEYS, SHARED_KEYS_OUTSIDE_STACKS),
)


def fixed_upstream(source: Source) -> bool:
    text = source.text(CARRIER)
    return bool(text) and "self.config" not in text


def verify() -> None:
    from unittest import mock

    from megatron.core.transformer import multi_token_prediction

    from cppmega.proof import small_models

    from ._dsa_forward_proof import (
        RECOMPUTED,
        assert_bound_by_te,
        assert_kept,
        assert_released,
        keys_used,
    )

    # On main, it fails without Transformer Engine.
    asked = {"is_inference_column_parallel_linear": lambda linear: False}
    with mock.patch.multiple(multi_token_prediction, create=True, **asked):
        gpt = small_models.gpt(mtp=2, num_layers=2, **RECOMPUTED)
    depths = [layer.mtp_model_layer for layer in gpt.mtp.layers]
    names = ("L1", "L2", "M1", "M2")
    used = keys_used(gpt, dict(zip(names, (*gpt.decoder.layers, *depths), strict=True)))
    hybrid = small_models.hybrid(**RECOMPUTED)
    assert_kept({**used, **keys_used(hybrid, {"H1": hybrid.decoder.layers[0]})})
    assert used["L1"] == used["L2"] and used["M1"] == used["M2"] != used["L1"], "not shared"
    assert_released()
    for model in (gpt, hybrid):
        left = [name for name in vars(model.config.of_dsa) if "holder" in name]
        assert not left, f"{left} are left on the configuration"
    assert_bound_by_te()
