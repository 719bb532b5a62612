"""Capture the layers inside a hybrid model's MTP depths with Transformer Engine's CUDA graphs.

What: With `--cuda-graph-impl transformer_engine`, the layers of an MTP depth that is a hybrid stack
    are captured and replayed like those of the decoder. A depth that runs several times per
    microbatch (`--mtp-use-repeated-layer` with more than one depth) stays eager, with a warning: a
    graph has one set of buffers per microbatch, and the second run would overwrite what the
    backward of the first one needs.
Why: The helper looks for layers in `decoder.layers` and for `mtp_model_layer`, which is one layer
    in a GPT model and a whole stack in a hybrid one. A stack is not a layer, so its layers silently
    ran eagerly: in NAM56R's slice, two of the four DSA layers. `set_current_microbatch`, too, told
    only the stack which graph to replay, and not its layers.
Upstream: Not sent: found by reading 0.19.2, main and dev.
Remove: when `_discover_layers` looks inside the stacks of MTP depths.
Numerics: none (bitwise): the same kernels run, captured (NAM56R's slice on an H200: 8 layers,
    including those of both depths)
"""

from __future__ import annotations

from typing import Any

from cppmega.catalogue.megatron_args import cuda_graphs, has_mtp, layer_pattern
from cppmega.edits import in_order, replacing
from cppmega.page import Edit, Patch, Source

FILE = "megatron/core/transformer/cuda_graphs.py"
HELPER = f"{FILE}:TECudaGraphHelper"


def _cppmega_mtp_layers(model):
    """The layers of a model's MTP depths: each depth is a layer, or a hybrid stack of them."""
    depths = [depth.mtp_model_layer for depth in model.mtp.layers]
    return [
        layer
        for depth in depths
        for layer in ([depth] if isinstance(depth, GraphableMegatronModule) else depth.layers)  # noqa: F821
    ]


def _cppmega_graphable_mtp_layers(model):
    """Those whose buffers one graph per microbatch can hold."""
    config = model.config
    if getattr(config, "mtp_use_repeated_layer", False) and config.mtp_num_layers > 1:
        logger.warning(  # noqa: F821
            "te_graphs_hybrid_mtp: the MTP depths are one layer that runs %d times per microbatch, "
            "and stay without CUDA graphs",
            config.mtp_num_layers,
        )
        return []
    return _cppmega_mtp_layers(model)


ONE_LAYER = "layer is mtp_layer.mtp_model_layer for mtp_layer in chunk_of_the_layer.mtp.layers"

PATCH = Patch(
    purpose="speed",
    edits=(
        Edit(
            target=f"{HELPER}._discover_layers",
            pins={
                "0.17.1": "304bb2e1fa0e2f5b",
                "0.18.2": "a8f7435451704163",
                "0.19.2": "a8f7435451704163",
                "main-d98e8a64": "a8f7435451704163",
                "dev-d48bd6be": "a8f7435451704163",
            },
            edit=in_order(
                replacing(
                    "num_mtp_layers = len(chunk_with_decoder.mtp.layers)",
                    """
                    mtp_layers = _cppmega_graphable_mtp_layers(chunk_with_decoder)
                    num_mtp_layers = len(mtp_layers)
                    """,
                ),
                replacing(
                    "layer = chunk_with_decoder.mtp.layers[layer_number].mtp_model_layer",
                    "layer = mtp_layers[layer_number]",
                ),
            ),
            helpers=(_cppmega_mtp_layers, _cppmega_graphable_mtp_layers),
        ),
        Edit(
            target=f"{HELPER}._get_sample_arguments",
            pins={
                "0.17.1": "53b575d5843c5648",
                "0.18.2": "489e8786fefaf925",
                "0.19.2": "489e8786fefaf925",
                "main-d98e8a64": "489e8786fefaf925",
                "dev-d48bd6be": "e387b081457e6f3b",
            },
            edit=replacing(
                f"any({ONE_LAYER})",
                "any(layer is each for each in _cppmega_mtp_layers(chunk_of_the_layer))",
            ),
            mark="",
        ),
        Edit(
            target=f"{FILE}:set_current_microbatch",
            pins={
                "0.17.1": "3509e9bd04c06da1",
                "0.18.2": "3509e9bd04c06da1",
                "0.19.2": "3509e9bd04c06da1",
                "main-d98e8a64": "3509e9bd04c06da1",
                "dev-d48bd6be": "3509e9bd04c06da1",
            },
            edit=replacing(
                "layer.mtp_model_layer.current_microbatch = microbatch_id",
                """
                inner = layer.mtp_model_layer
                for each in getattr(inner, "layers", [inner]):
                    each.current_microbatch = microbatch_id
                """,
            ),
            mark="",
        ),
    ),
    reached="startup",
    when=lambda args: (
        cuda_graphs(args) == "transformer_engine" and has_mtp(args) and bool(layer_pattern(args))
    ),
    # 0.16 does not capture MTP at all.
    feature=("megatron/core/transformer/cuda_graphs.py:TECudaGraphHelper.capture_finished",),
)


def fixed_upstream(source: Source) -> bool:
    text = source.text(f"{HELPER}._discover_layers")
    return bool(text) and ".mtp.layers[layer_number].mtp_model_layer" not in text


def verify() -> None:
    from types import SimpleNamespace
    from unittest import mock

    import torch
    from megatron.core.transformer import cuda_graphs
    from megatron.core.transformer.module import GraphableMegatronModule

    from cppmega.proof import cpu_shims

    cpu_shims.init_distributed()

    class Layer(GraphableMegatronModule):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.config = SimpleNamespace()

        def get_layer_static_inputs(self, length, batch):  # type: ignore[no-untyped-def]
            return {"hidden_states": torch.zeros(length, batch, 1)}

    def stack(layers: int) -> Any:
        module = torch.nn.Module()
        module.layers = torch.nn.ModuleList([Layer() for _ in range(layers)])
        return module

    def discovered(repeated: bool) -> Any:
        """Look into two decoder layers, a depth that is a stack, and one that is a layer."""
        depths = [SimpleNamespace(mtp_model_layer=depth) for depth in (stack(2), Layer())]
        config = SimpleNamespace(mtp_use_repeated_layer=repeated, mtp_num_layers=2)
        model = SimpleNamespace(decoder=stack(2), mtp=SimpleNamespace(layers=depths), config=config)
        helper = cuda_graphs.TECudaGraphHelper.__new__(cuda_graphs.TECudaGraphHelper)
        graphs = SimpleNamespace(
            cuda_graph_impl="transformer_engine",
            cuda_graph_modules=[],
            cuda_graph_scope=[],  # the name in 0.17
        )
        helper.model, helper.config = [model], graphs
        helper.tp_group = helper.dp_cp_group = None
        helper.num_model_chunks = helper.num_microbatches = 1
        helper.seq_length, helper.micro_batch_size = 4, 2
        helper._discover_layers()
        return helper

    quiet = mock.patch.object(cuda_graphs, "log_on_each_pipeline_stage")
    with quiet, mock.patch.object(cuda_graphs, "is_te_min_version", lambda version: True):
        helper = discovered(repeated=False)
        (model,) = helper.model
        stacked, plain = (depth.mtp_model_layer for depth in model.mtp.layers)
        every = [*model.decoder.layers, *stacked.layers, plain]
        assert len(helper.flattened_callables) == 5, "layers of a stack are not captured"
        assert all(a is b for a, b in zip(helper.flattened_callables, every, strict=True))
        assert helper.flattened_callables_is_mtp == [False, False, True, True, True]
        inputs, _ = helper._get_sample_arguments([1, -1])
        assert [x.shape for (x,) in inputs] == [(4, 2, 1)] * 5
        cuda_graphs.set_current_microbatch(model, 3)
        assert [layer.current_microbatch for layer in every] == [3] * 5
        assert len(discovered(repeated=True).flattened_callables) == 2, "runs twice on one graph"
