"""Keep the keys that DSA layers share for the forward that chose them.

What: With `--dsa-indexer-topk-freq` above 1, a Shared layer uses the keys that a Full layer chose.
    They are kept on an object of one microbatch's pass through a stack of layers, or through an MTP
    depth. `tensor_parallel.checkpoint` and `te_checkpoint`, the only ones that recompute attention,
    bind their function to that object: a recomputed layer, Full or Shared, attends to the keys of
    its own forward, in whatever order layers are recomputed. The object is released together with
    the graph of its microbatch, or, where nothing is recomputed, when the stack is done. A depth
    finds the keys of the depths before it, as upstream numbers those of a GPT model, and not those
    of the decoder: on the dev branch, which continues the decoder's numbers, a depth that shares
    with a decoder layer raises the error of a Full layer that did not run. Refused are CUDA graphs
    of attention layers, and the schedule of `--overlap-moe-expert-parallel-comm`: neither calls a
    stack. Recomputation then keeps the indices of each Full layer for every microbatch under way. A
    Full layer that is recomputed takes the gradient of its sparse loss over keys that it chooses
    again, as it does without sharing.
Why: Stock hangs the keys on the packed-sequence parameters, on the attention mask or, without
    either, on the configuration of the model. Without a mask, as in most training, a layer that is
    recomputed uses the keys of the latest forward, so with a second microbatch in between (pipeline
    stages, or evaluation) gradients are wrong, without an error. With a mask the recomputation gets
    another tensor and stops with a RuntimeError. Layers of MTP depths count from 1 again and
    overwrite the keys of the decoder's first layers, so one microbatch is enough. The last keys
    stay on the configuration for good. All were seen on CPU with GPT and hybrid models.
Upstream: https://github.com/NVIDIA/Megatron-LM/pull/6793 (open)
Remove: when the keys that layers share are kept for each forward, MTP depths included.
Numerics: changes results: gradients are those of the keys that the forward used. Outputs do not
    change, nor do gradients where stock is right: without recomputation, or with one microbatch at
    a time, no MTP depths, and a choice that repeats (bitwise).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cppmega.catalogue.megatron_args import shares_dsa_keys
from cppmega.edits import body_of, in_order, inserting, replacing
from cppmega.errors import CppmegaError
from cppmega.page import Edit, Patch, Source

DSA = "megatron/core/transformer/experimental_attention_variant/dsa.py:DSAttention"
CARRIER = f"{DSA}._get_index_share_carrier"
MTP = "megatron/core/transformer/multi_token_prediction.py:MultiTokenPredictionBlock.forward"
OPENS = ("from cppmega.modules.dsa_forward import forward as _cppmega_forward",)
BINDS = ("from cppmega.modules.dsa_forward import bound as _cppmega_bound",)
DEPTHS = ("from cppmega.modules.dsa_forward import Depths as _CppmegaDepths",)


def _get_index_share_carrier(self, packed_seq_params, attention_mask):
    from cppmega.modules.dsa_forward import current

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
# A depth of the dev branch is used for its last norm, too.
AFTER_NORM = in_order(
    replacing("self.layers[layer_idx]._postprocess", "cppmega_depth._postprocess"),
    OWN_FORWARD,
    inserting(
        "cppmega_depth = self.layers[layer_idx]",
        after="layer_idx = 0 if self.mtp_use_repeated_layer else iteration",
    ),
)


_WHOSE = "A layer could not tell which microbatch's keys are its own."
_ALONE = "--dsa-indexer-topk-freq 1"


def refuses(args: Any, saved: Mapping[str, tuple[int, ...]]) -> Iterator[CppmegaError]:
    """Name what runs the layers of a stack without calling it."""
    if not shares_dsa_keys(args):
        return
    modules = getattr(args, "cuda_graph_modules", None) or ("attn",)
    if isinstance(modules, str):
        modules = (modules,)
    captured = {getattr(module, "name", module) for module in modules} & {"attn", "full"}
    if captured and getattr(args, "cuda_graph_impl", None) in ("local", "transformer_engine"):
        yield CppmegaError(
            "dsa-index-share-in-graphs",
            "DSA layers that share keys do not support CUDA graphs of single attention layers "
            f"(--cuda-graph-impl {args.cuda_graph_impl}).",
            _WHOSE,
            f"--cuda-graph-impl none, or --cuda-graph-modules without attn, or {_ALONE}",
        )
    if getattr(args, "overlap_moe_expert_parallel_comm", False):
        yield CppmegaError(
            "dsa-index-share-in-combined-schedule",
            "DSA layers that share keys do not support the schedule of "
            "--overlap-moe-expert-parallel-comm, which interleaves the layers of two microbatches.",
            _WHOSE,
            f"leave out --overlap-moe-expert-parallel-comm, or {_ALONE}",
        )


PATCH = Patch(
    edits=(
        Edit(
            target=CARRIER,
            pins={
                "0.19.2": "35322e5f1f848140",
                "main-d98e8a64": "35322e5f1f848140",
                "dev-d48bd6be": "35322e5f1f848140",
            },
            edit=body_of(_get_index_share_carrier),
        ),
        Edit(
            target=f"{DSA}._get_index_share_topk_holder",
            pins={
                "0.19.2": "f6a79fffd63502fc",
                "main-d98e8a64": "f6a79fffd63502fc",
                "dev-d48bd6be": "f6a79fffd63502fc",
            },
            edit=replacing("holder = {}", "holder = carrier.holder(self._HOLDER_ATTR)"),
            mark="",  # it asks for the carrier
        ),
        Edit(
            target=f"{DSA}._get_index_share_topk_length_holder",
            pins={
                "0.19.2": "9e9170107414084d",
                "main-d98e8a64": "9e9170107414084d",
                "dev-d48bd6be": "9e9170107414084d",
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
            },
            edit=replacing(
                "with rng_context, outer_quantization_context:",
                "with _cppmega_forward(), rng_context, outer_quantization_context:",
            ),
            imports=OPENS,
            mark="",  # models without DSA pass here
        ),
        Edit(
            target="megatron/core/models/hybrid/hybrid_block.py:HybridStack.forward",
            pins={
                "0.19.2": "50ac5b73f74c7aa0",
                "main-d98e8a64": "50ac5b73f74c7aa0",
                "dev-d48bd6be": "edfdf11c3ea33a4e",
            },
            edit=replacing(
                "with outer_fp8_context:", "with _cppmega_forward(), outer_fp8_context:"
            ),
            imports=OPENS,
            mark="",
        ),
        Edit(
            target=MTP,
            pins={"0.19.2": "a84af2ded90d3f89", "main-d98e8a64": "0efa4646a6494f4c"},
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
            },
            edit=replacing(
                "CheckpointFunction.apply(function, distribute_saved_activations, *args)",
                "CheckpointFunction.apply("
                "_cppmega_bound(function), distribute_saved_activations, *args)",
            ),
            imports=BINDS,
            mark="",
        ),
        Edit(
            target="megatron/core/extensions/transformer_engine.py:te_checkpoint",
            pins={
                "0.19.2": "23886b0d89555be2",
                "main-d98e8a64": "23886b0d89555be2",
                "dev-d48bd6be": "23886b0d89555be2",
            },
            edit=inserting(
                "forward_func = _cppmega_bound(forward_func)",
                before="from transformer_engine.pytorch.distributed import checkpoint",
            ),
            imports=BINDS,
            mark="",
        ),
    ),
    reached="forward",
    when=shares_dsa_keys,
    feature=(CARRIER,),
    after=("dsa_indexer_kernels", "dsa_backend_limits"),
    refuses=refuses,
)


def fixed_upstream(source: Source) -> bool:
    text = source.text(CARRIER)
    return bool(text) and "self.config" not in text


def verify() -> None:
    from unittest import mock

    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import multi_token_prediction
    from megatron.core.transformer.experimental_attention_variant import dsa

    from cppmega.proof import small_models

    full = {
        **{"recompute_granularity": "full", "recompute_method": "uniform"},
        **{"recompute_num_layers": 1},
    }
    used: dict[str, list[list[Any]]] = {}
    # On main, it fails without Transformer Engine.
    asked = {"is_inference_column_parallel_linear": lambda linear: False}
    with mock.patch.multiple(multi_token_prediction, create=True, **asked):
        gpt = small_models.gpt(mtp=2, num_layers=2, **full)
    depths = [layer.mtp_model_layer for layer in gpt.mtp.layers]
    hybrid = small_models.hybrid(**full)
    with (
        mock.patch.object(random, "_get_cuda_rng_state", return_value=None),
        mock.patch.object(random, "_set_cuda_rng_state"),
        mock.patch.object(dsa, "_run_sparse_attention", _noting(dsa._run_sparse_attention, used)),
    ):
        for model, names in ((gpt, ("L1", "L2", "M1", "M2")), (hybrid, ("H1",))):
            layers = (*model.decoder.layers, *depths) if model is gpt else model.decoder.layers
            for name, layer in zip(names, layers, strict=False):
                layer.self_attention = _sharing(name, model.config)
            losses = [_loss(model, seed) for seed in (0, 1)]
            for loss in losses:
                loss.backward()
            del losses, loss
    for name, (first, second, *again) in used.items():
        assert first != second, "both microbatches choose the same keys"
        assert again == [first, second], f"{name} is recomputed on keys of another forward"
    assert used["L1"] == used["L2"] and used["M1"] == used["M2"] != used["L1"], "not shared"
    for model in (gpt, hybrid):
        _assert_released(model.config)
    _verify_te_checkpoint()


def _noting(attention: Any, used: dict[str, list[list[Any]]]) -> Any:
    """`_run_sparse_attention`, which notes the keys that each layer attends to."""

    def noting(*, topk_indices: Any, config: Any, **given: Any) -> Any:
        used.setdefault(config.running, []).append(topk_indices.tolist())
        return attention(topk_indices=topk_indices, config=config, **given)

    return noting


def _loss(model: Any, seed: int) -> Any:
    import torch

    from cppmega.proof import small_models

    torch.manual_seed(seed)
    tokens = torch.randint(small_models.V, (small_models.B, small_models.S))
    given = {"input_ids": tokens, "labels": tokens, "attention_mask": None}
    return model(**small_models.arguments(model, **given)).sum()


def _sharing(name: str, model_config: Any) -> Any:
    """A layer's attention: number 1 is Full and never chooses alike, number 2 is Shared."""
    import torch

    from ._dsa_layer import layer

    core = layer(None, None, None, topk=2, dsa_indexer_loss_coeff=0.0)
    if not hasattr(model_config, "of_dsa"):
        model_config.of_dsa = core.config  # one for all layers, as in a model
    core.config, core.index_share = model_config.of_dsa, True
    core.layer_number, core.source_layer = int(name[1]), 1
    core.skip_topk = core.layer_number != 1
    calls = []

    def projected(x: Any, *ignored: Any) -> Any:
        calls.append(x)
        return x.unsqueeze(2), x * (-1) ** len(calls), torch.ones(*x.shape[:2], 1)

    core.indexer.forward_before_topk = projected

    class Attention(torch.nn.Module):
        def forward(self, hidden_states: Any, **ignored: Any) -> Any:
            from megatron.core.transformer.enums import AttnMaskType

            core.config.running = name
            x = hidden_states.unflatten(-1, (2, -1))
            causal = AttnMaskType.causal
            return core(x, x, x, None, hidden_states, hidden_states, attn_mask_type=causal), None

    return Attention()


def _assert_released(model_config: Any) -> None:
    import gc

    from cppmega.modules.dsa_forward import Forward

    gc.collect()
    assert not any(isinstance(thing, Forward) for thing in gc.get_objects()), "a forward leaks"
    left = [name for name in vars(model_config.of_dsa) if "holder" in name]
    assert not left, f"{left} are left on the configuration"


def _verify_te_checkpoint() -> None:
    import sys
    from types import ModuleType
    from unittest import mock

    from megatron.core.extensions import transformer_engine as extension

    from cppmega.modules import dsa_forward

    package = "transformer_engine"
    names = (package, f"{package}.pytorch", f"{package}.pytorch.distributed")
    stand_ins: dict[str, Any] = {name: ModuleType(name) for name in names}
    stand_ins[names[-1]].checkpoint = lambda function, *args, **named: function
    with (
        mock.patch.dict(sys.modules, stand_ins),
        mock.patch.object(extension, "HAVE_TE", True),
        mock.patch.object(extension, "is_te_min_version", return_value=True),
        dsa_forward.forward() as here,
    ):
        again = extension.te_checkpoint(dsa_forward.current, False, None, None)
    assert again() is here, "te_checkpoint recomputes outside of the forward"
