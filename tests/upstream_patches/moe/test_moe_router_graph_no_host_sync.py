"""When the host waits for an MoE router in a graph, and what the experts receive."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.upstream_patches import one_process

torch = pytest.importorskip("torch")

PAGE = "moe_router_graph_no_host_sync"


@pytest.mark.megatron
@pytest.mark.parametrize("version", one_process.PAGES[PAGE])
def test_waiting(version: str) -> None:
    one_process.assert_passes(PAGE, version)


def check(stock: one_process.Stock) -> None:
    from megatron.core.transformer import transformer_layer as patched

    unpatched = stock.module("megatron.core.transformer.transformer_layer")
    experts_wait = ["record", "synchronize", "experts"]
    for recompute in (False, True):
        for devices in (("cpu",), ("cuda", "cpu"), ("cpu", "cuda")):
            assert calls(patched, devices, recompute) == experts_wait
        for devices in ((), ("cuda",), ("cuda", "cuda")):
            assert calls(patched, devices, recompute) == ["experts"]
            assert calls(unpatched, devices, recompute) == experts_wait


def calls(module: Any, devices: tuple[str, ...], recompute: bool) -> list[str]:
    """Return the calls of the event and of the experts in order; the layer is recomputed once."""
    done: list[str] = []
    values = {str(at): SimpleNamespace(is_cuda=kind == "cuda") for at, kind in enumerate(devices)}
    layer = module.MoETransformerLayer.__new__(module.MoETransformerLayer)
    torch.nn.Module.__init__(layer)
    layer.config = SimpleNamespace(fp8=None, fp4=None)
    layer.is_moe_layer = True
    layer.use_partial_cudagraphs, layer.moe_layer_recompute = True, recompute
    layer.token_dispatcher_attrs = values
    layer.mlp = SimpleNamespace(token_dispatcher=SimpleNamespace())
    layer._router_dtoh_event = SimpleNamespace(
        record=lambda: done.append("record"), synchronize=lambda: done.append("synchronize")
    )
    experts = module.MoETransformerLayer._forward_mlp_expert_compute
    returned = "token_dispatcher_attr_outputs" in experts.__code__.co_varnames
    layer._forward_mlp_router = lambda hidden, **_: (
        hidden,
        hidden,
        hidden,
        None,
        *(values.values() if returned else ()),
    )

    def compute(hidden: Any, *given: Any) -> Any:
        done.append("experts")
        assert not returned or given[1] == list(values.values())
        return hidden, None

    layer._forward_mlp_expert_compute = compute
    layer._forward_mlp_postprocess = lambda residual, output, *_: output
    checkpointing = SimpleNamespace(checkpoint=lambda function, _, hidden: function(hidden))
    original, module.tensor_parallel = module.tensor_parallel, checkpointing
    try:
        hidden = torch.ones(2, 1, 1)
        assert torch.equal(layer._forward_mlp(hidden), hidden)
    finally:
        module.tensor_parallel = original
    return done
