"""Transformer Engine's CUDA graphs of the layers in a hybrid model's MTP depths.

Without a GPU nothing is captured. What would be a graph runs the layer's captured part each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from tests.upstream_patches import one_process
from tests.upstream_patches.mtp import test_hybrid_mtp_padding_mask as hybrid

torch = pytest.importorskip("torch")

PAGE = "te_graphs_hybrid_mtp"
MICROBATCHES = 2


@pytest.mark.megatron
@pytest.mark.parametrize("version", one_process.PAGES[PAGE])
def test_model(version: str) -> None:
    one_process.assert_passes(PAGE, version)


def check(stock: one_process.Stock) -> None:
    from megatron.core.transformer import cuda_graphs as patched

    from cppmega.proof import cpu_shims

    cpu_shims.init_distributed()
    unpatched = stock.module("megatron.core.transformer.cuda_graphs")
    eager, none = trained(None)
    ours, replayed = trained(patched)
    theirs, decoder_only = trained(unpatched)
    assert ours == theirs == eager
    assert none == []
    # Each microbatch has graphs of its own: of the decoder's layer and of each depth's.
    assert replayed == [(layer, at) for at in range(MICROBATCHES) for layer in range(3)]
    assert decoder_only == [(0, at) for at in range(MICROBATCHES)]


def trained(graphs: Any) -> tuple[list[float], list[tuple[int, int]]]:
    """Train on two microbatches, with the helper of a `cuda_graphs` module.

    Returns:
        The norms of the gradients, and the replays: which layer of the model, and which
        microbatch's graph.
    """
    from megatron.core.models.hybrid import hybrid_model
    from megatron.core.transformer import cuda_graphs as live

    model = hybrid.build(hybrid_model, cuda_graph_impl="transformer_engine", cuda_graph_modules=[])
    tokens = torch.arange(16).view(2, 8)
    replays: list[tuple[int, int]] = []
    with torch.compiler.set_stance("force_eager"), without_engine():
        if graphs is not None:
            capture(graphs, model, replays)
        for at in range(MICROBATCHES):
            (graphs or live).set_current_microbatch(model, at)
            model((tokens + at) % 32, tokens % 8, None, labels=tokens).sum().backward()
    norms = [p.grad.norm().item() for p in model.parameters() if p.grad is not None]
    return norms, replays


def capture(graphs: Any, model: Any, replays: list[tuple[int, int]]) -> None:
    """Run the helper; its graphs run the layers, and note the replay."""
    layers = [
        *model.decoder.layers,
        *(x for d in model.mtp.layers for x in d.mtp_model_layer.layers),
    ]
    order = {id(layer): at for at, layer in enumerate(layers)}

    def graphed(callables: Any, *_: Any, **__: Any) -> list[Callable[..., Any]]:
        return [
            graph_of(layer, microbatch) for microbatch in range(MICROBATCHES) for layer in callables
        ]

    def graph_of(layer: Any, microbatch: int) -> Callable[..., Any]:
        def replay(hidden: Any, attention_mask: Any = None, **others: Any) -> Any:
            replays.append((order[id(layer)], microbatch))
            return layer._te_cuda_graph_capture(hidden, attention_mask=attention_mask)

        return replay

    helper = graphs.TECudaGraphHelper.__new__(graphs.TECudaGraphHelper)
    helper.model, helper.config = [model], model.config
    helper.tp_group = helper.dp_cp_group = None
    helper.num_microbatches, helper._capture_finished = MICROBATCHES, False
    helper._get_cuda_graph_input_data = lambda: ([], {})
    helper._start_capturing = lambda: 0.0
    helper._finish_capturing = lambda start: None
    made = mock.patch.object(graphs, "make_graphed_callables", graphed, create=True)
    with made, mock.patch.object(graphs, "log_on_each_pipeline_stage"):
        helper._discover_layers()
        helper.create_cudagraphs()


def without_engine() -> Any:
    """Call a graph with the arguments of any module: those of a layer ask for the engine."""
    from megatron.core.transformer.module import GraphableMegatronModule
    from megatron.core.transformer.transformer_layer import TransformerLayer

    name = "_get_te_cuda_graph_replay_args"
    return mock.patch.object(TransformerLayer, name, getattr(GraphableMegatronModule, name))
