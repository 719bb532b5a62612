"""Keep the outputs that a local CUDA graph passes to eager code until its backward pass.

What: With `--cuda-graph-impl local`, the memory of a graph's output that is not an input of another
    graph is kept for the backward pass, whether or not the output has a gradient.
Why: Stock keeps it only if the output has one. The graph of an MoE router also returns indices, the
    map of a permutation, which the eager experts save for their backward pass. Their memory is
    reused by graphs that are captured later, and the second step, which is the first one to replay,
    fails with `vectorized gather kernel index out of bounds` (NAM56R's slice, dispatcher alltoall,
    modules `attn` and `moe_router`, on an H200), or would compute gradients with another layer's
    values. Up to 0.18 the memory of all outputs is kept.
Upstream: Not sent: found on an H200 on 2026-11-23; main of August 2026 has the same line.
Remove: when `_weakref_forward_buffers` keeps outputs without a gradient.
Numerics: changes results of runs with local CUDA graphs whose outputs eager code saves
"""

from cppmega.edits import replacing
from cppmega.page import Edit, Patch, Source

TARGET = "megatron/core/transformer/cuda_graphs.py:_CudaGraphRunner._weakref_forward_buffers"

PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=TARGET,
            pins={"0.19.2": "0e78e5c5cd085e5e"},
            edit=replacing(
                """
                return bool(
                    torch.is_tensor(tensor)
                    and tensor.requires_grad
                    and metadata is not None
                    and metadata.is_cudagraph_output
                    and not metadata.is_cudagraph_input
                )
                """,
                """
                return bool(
                    torch.is_tensor(tensor)
                    and metadata is not None
                    and metadata.is_cudagraph_output
                    and not metadata.is_cudagraph_input
                )
                """,
            ),
        ),
    ),
    reached="never",  # graphs are created after the first step, and only in few runs
    # Up to 0.18 the memory of every output is kept.
    feature=("megatron/core/transformer/cuda_graphs.py:_tag_cudagraph_buffer_saved_for_backward",),
)


def fixed_upstream(source: Source) -> bool:
    text = source.text(TARGET)
    return bool(text) and "and tensor.requires_grad" not in text


def verify() -> None:
    from unittest import mock

    import torch
    from megatron.core.transformer import cuda_graphs

    def output(tensor, **also):  # type: ignore[no-untyped-def]
        tensor.cg_buffer_metadata = cuda_graphs.CudagraphBufferMetadata(
            is_cudagraph_output=True, **also
        )
        return tensor

    weak = mock.Mock(name="a reference that does not keep memory")
    runner = cuda_graphs._CudaGraphRunner.__new__(cuda_graphs._CudaGraphRunner)
    torch.nn.Module.__init__(runner)
    indices = output(torch.arange(3))
    hidden = output(torch.ones(3, requires_grad=True))
    to_another_graph = output(torch.ones(3, requires_grad=True), is_cudagraph_input=True)
    runner.fwd_graph_input_surface = runner.fwd_graph_input_args = (torch.ones(1),)
    runner.fwd_graph_input_kwargs = {}
    runner.fwd_graph_outputs = runner.fwd_graph_output_surface = (indices, hidden, to_another_graph)
    with mock.patch.object(cuda_graphs, "make_weakref", lambda *_: weak):
        runner._weakref_forward_buffers(preserve_forward_to_backward_lifetimes=True)
    kept = runner.fwd_graph_output_surface
    assert kept[0] is indices, "the memory of an output without a gradient may be reused"
    assert kept[1] is hidden
    assert kept[2] is weak, "the memory that graphs share is kept longer than needed"
    assert runner.fwd_graph_input_surface == (weak,)
