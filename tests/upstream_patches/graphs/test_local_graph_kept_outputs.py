"""The backward of eager code reads what a graph returned, not the values of a later graph."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from tests.upstream_patches import one_process

torch = pytest.importorskip("torch")

PAGE = "local_graph_kept_outputs"
GARBAGE = 2


@pytest.mark.megatron
@pytest.mark.parametrize("version", one_process.PAGES[PAGE])
def test_what_eager_code_saves_stays(version: str) -> None:
    one_process.assert_passes(PAGE, version)


def check(stock: one_process.Stock) -> None:
    from megatron.core.transformer import cuda_graphs as patched

    unpatched = stock.module("megatron.core.transformer.cuda_graphs")
    assert gradient(patched) == [0.0, 2.0, 0.0, 1.0]
    assert gradient(unpatched) == [0.0, 0.0, 3.0, 0.0], "all rows are those of the later graph"


def gradient(graphs: Any) -> list[float]:
    """Return the gradient of a graph's output, from which eager code takes rows 3, 1 and 1."""

    def output(tensor: Any) -> Any:
        tensor.cg_buffer_metadata = graphs.CudagraphBufferMetadata(is_cudagraph_output=True)
        return tensor

    given_away: list[Any] = []
    runner = graphs._CudaGraphRunner.__new__(graphs._CudaGraphRunner)
    torch.nn.Module.__init__(runner)
    outputs = (output(torch.ones(4, requires_grad=True)), output(torch.tensor([3, 1, 1])))
    runner.fwd_graph_input_surface = runner.fwd_graph_input_args = ()
    runner.fwd_graph_input_kwargs = {}
    runner.fwd_graph_outputs = runner.fwd_graph_output_surface = outputs
    with mock.patch.object(graphs, "make_weakref", lambda ten: given_away.append(ten) or ten):
        runner._weakref_forward_buffers(preserve_forward_to_backward_lifetimes=True)
    hidden, indices = runner.fwd_graph_output_surface
    # As the experts, which are not captured, save the map of their permutation.
    rows = hidden.index_select(0, indices)
    for tensor in given_away:  # the replay of a graph that was captured later, unseen by autograd
        tensor.data.fill_(GARBAGE)
    rows.sum().backward()
    found: list[float] = hidden.grad.tolist()
    return found
