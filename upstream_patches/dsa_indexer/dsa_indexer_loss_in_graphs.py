"""Count DSA's indexer loss once when layers are captured in CUDA graphs.

What: Warming up and capturing a graph leaves the logged indexer loss unchanged, with
    `--cuda-graph-impl` local and transformer_engine.
Why: A captured layer runs before training does: Transformer Engine warms up each layer, as do
    Megatron's own graphs, and every such run adds its loss, on dummy inputs, to the log. Megatron
    protects the MoE losses from this, but not the indexer's, so the first value logged after a
    capture is that of several microbatches. What a replay adds is correct: the addition is part of
    the graph.
Upstream: https://github.com/NVIDIA/Megatron-LM/pull/7290 (open)
Remove: when capturing preserves the values of `DSAIndexerLossLoggingHelper.tracker`.
Numerics: none (bitwise); only the logged metric changes
"""

from __future__ import annotations

from typing import Any

from cppmega.catalogue.megatron_args import cuda_graphs, uses_dsa
from cppmega.edits import in_order, inserting, replacing
from cppmega.page import Edit, Patch, Source

FILE = "megatron/core/transformer/cuda_graphs.py"
HELPER = f"{FILE}:TECudaGraphHelper.create_cudagraphs"


def _cppmega_indexer_losses():
    """The logged indexer losses, which runs for a capture must not change."""
    from megatron.core.transformer.experimental_attention_variant import dsa

    tracker = dsa.DSAIndexerLossLoggingHelper.tracker
    return {name: value.clone() for name, value in tracker.items() if torch.is_tensor(value)}  # noqa: F821


def _cppmega_restore_indexer_losses(kept):
    """Write them back in place: the graphs add to these tensors."""
    from megatron.core.transformer.experimental_attention_variant import dsa

    for name, value in dsa.DSAIndexerLossLoggingHelper.tracker.items():
        if torch.is_tensor(value):  # noqa: F821
            value.zero_()  # a capture may have made it, or have made it longer
            if name in kept:
                value[: kept[name].numel()] = kept[name]


HELPERS = _cppmega_indexer_losses, _cppmega_restore_indexer_losses

PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=f"{FILE}:create_cudagraphs",
            pins={
                "0.16.1": "96b830f140cf739e",
                "0.17.1": "96b830f140cf739e",
                "0.18.2": "96b830f140cf739e",
                "0.19.2": "96b830f140cf739e",
                "main-d98e8a64": "96b830f140cf739e",
                "dev-d48bd6be": "96b830f140cf739e",
            },
            # Called after every step, it captures after the first one.
            edit=replacing(
                "return _CudagraphGlobalRecord.create_cudagraphs()",
                """
                if not _CudagraphGlobalRecord.cudagraph_record:
                    return _CudagraphGlobalRecord.create_cudagraphs()
                losses = _cppmega_indexer_losses()
                stats = _CudagraphGlobalRecord.create_cudagraphs()
                _cppmega_restore_indexer_losses(losses)
                return stats
                """,
            ),
            helpers=HELPERS,
        ),
        Edit(
            target=HELPER,
            pins={
                "0.16.1": "3e0af41c0fe1054a",
                "0.17.1": "259dae5658402847",
                "0.18.2": "259dae5658402847",
                "0.19.2": "259dae5658402847",
                "main-d98e8a64": "259dae5658402847",
                "dev-d48bd6be": "eca40e7ed06550cd",
            },
            edit=in_order(
                inserting(
                    "losses = _cppmega_indexer_losses()",
                    before="start_time = self._start_capturing()",
                ),
                inserting(
                    "_cppmega_restore_indexer_losses(losses)",
                    after="self._finish_capturing(start_time)",
                ),
            ),
            helpers=HELPERS,
            mark="",  # it captures only after the warm-up steps
        ),
    ),
    reached="forward",
    when=lambda args: uses_dsa(args) and cuda_graphs(args) == "local",
    feature=(
        "megatron/core/transformer/experimental_attention_variant/dsa.py"
        ":DSAIndexerLossLoggingHelper",
    ),
)


def fixed_upstream(source: Source) -> bool:
    return "DSAIndexerLossLoggingHelper" in source.file(FILE)


def verify() -> None:
    from types import SimpleNamespace
    from unittest import mock

    import torch
    from megatron.core.transformer import cuda_graphs
    from megatron.core.transformer.experimental_attention_variant import dsa

    from cppmega.proof import cpu_shims

    cpu_shims.init_distributed()
    helper = dsa.DSAIndexerLossLoggingHelper
    record = cuda_graphs._CudagraphGlobalRecord

    def logged(loss: float) -> None:
        helper.save_loss_to_tracker(torch.tensor(loss), 1, 2)

    def values() -> Any:
        return helper.tracker["values"].tolist()

    def captures(*_: Any) -> str:
        """Log what the runs of a capture would log."""
        logged(7.0)
        return "stats"

    on_cpu = mock.patch.object(torch.cuda, "current_device", lambda: "cpu")
    captured = mock.patch.object(cuda_graphs, "make_graphed_callables", captures, create=True)
    with on_cpu, captured, mock.patch.dict(helper.tracker, clear=True):
        with mock.patch.multiple(record, cudagraph_record=["one"], create_cudagraphs=captures):
            logged(1.0)
            there = helper.tracker["values"]
            assert cuda_graphs.create_cudagraphs() == "stats"
            assert values() == [1.0, 0.0], "a local capture is logged"
            assert helper.tracker["values"] is there, "graphs add to another tensor"
        replays = mock.Mock(return_value=None)
        with mock.patch.multiple(record, cudagraph_record=[], create_cudagraphs=replays):
            assert cuda_graphs.create_cudagraphs() is None and replays.call_count == 1
        te = cuda_graphs.TECudaGraphHelper.__new__(cuda_graphs.TECudaGraphHelper)
        te._start_capturing, te._finish_capturing = captures, captures
        te.flattened_callables = te.callables_per_chunk = []
        te.config = SimpleNamespace(sequence_parallel=False)  # 0.16 captures even without layers
        te._get_cuda_graph_input_data = lambda: ((), {})
        te.create_cudagraphs()
        assert values() == [1.0, 0.0], "a capture of Transformer Engine is logged"
        helper.tracker.clear()
        te.create_cudagraphs()
        assert values() == [0.0, 0.0], "a loss that only a capture saved is logged"
