"""Wait for the graph of an MoE router only if the host needs a value from it.

What: With CUDA graphs of the router alone, `MoETransformerLayer` waits for the router's copies to
    the host only if the dispatcher has values there.
Why: Stock waits after every replay, so that the host cannot enqueue ahead: one wait per MoE layer
    and microbatch. With the DeepEP and HybridEP dispatchers every value stays on the device, and
    there is nothing to wait for (counted with a stand-in for the event, 0.17.1 to 0.19.2).
Upstream: https://github.com/NVIDIA/Megatron-LM/pull/6432 (main, August 2026; not released)
Remove: when the event is only waited for if there are values on the host.
Numerics: none (bitwise)
"""

from typing import Any

from cppmega.edits import replacing
from cppmega.page import Edit, Patch, Source

TARGET = "megatron/core/transformer/transformer_layer.py:MoETransformerLayer._forward_mlp"
WAIT = """
self._router_dtoh_event.record()
self._router_dtoh_event.synchronize()
"""


def waiting_for(values: str) -> Any:
    return replacing(
        WAIT,
        f"""
        if not all(getattr(value, "is_cuda", False) for value in {values}):
            self._router_dtoh_event.record()
            self._router_dtoh_event.synchronize()
        """,
    )


PATCH = Patch(
    purpose="speed",
    edits=(
        Edit(
            target=TARGET,
            pins={
                "0.17.1": "268de2cf804d55f4",
                "0.18.2": "4e0a7bfec7336d35",
                "dev-d48bd6be": "f048aa5a9b2a34cf",
            },
            edit=waiting_for("self.token_dispatcher_attrs.values()"),
        ),
        Edit(
            target=TARGET,
            pins={"0.19.2": "07c795a0ae1b08c4"},
            edit=waiting_for("token_dispatcher_attr_outputs"),
        ),
    ),
    reached="never",  # most runs capture more of the layer than the router
    # 0.16 has neither this method nor the event.
    feature=(TARGET.replace("_forward_mlp", "transition_cudagraph_scope"),),
)


def fixed_upstream(source: Source) -> bool:
    return "self._synchronize_router_host_outputs(" in source.text(TARGET)


def verify() -> None:
    from types import SimpleNamespace
    from unittest import mock

    import torch
    from megatron.core.transformer.transformer_layer import MoETransformerLayer

    def waits(*devices):  # type: ignore[no-untyped-def]
        """Return how often the host waits if the dispatcher's values are on these devices."""
        values = {
            f"value{at}": SimpleNamespace(is_cuda=kind == "cuda", device=SimpleNamespace(type=kind))
            if kind
            else object()
            for at, kind in enumerate(devices)
        }
        layer = MoETransformerLayer.__new__(MoETransformerLayer)
        torch.nn.Module.__init__(layer)
        layer.config = SimpleNamespace(fp8=None, fp4=None)
        layer.is_moe_layer = True
        layer.use_partial_cudagraphs, layer.moe_layer_recompute = True, False
        layer.token_dispatcher_attrs = values
        layer.mlp = SimpleNamespace(token_dispatcher=SimpleNamespace())
        layer._router_dtoh_event = event = mock.Mock()
        takes_values = "token_dispatcher_attr_outputs" in (
            MoETransformerLayer._forward_mlp_expert_compute.__code__.co_varnames
        )
        routed = (None, "hidden", "probs", None, *(values.values() if takes_values else ()))
        layer._forward_mlp_router = lambda *_, **__: routed
        layer._forward_mlp_expert_compute = lambda hidden, *_: (hidden, None)
        layer._forward_mlp_postprocess = lambda residual, output, *_: output
        assert layer._forward_mlp(torch.zeros(2, 1, 1)) == "hidden"
        return event.record.call_count, event.synchronize.call_count

    assert waits("cuda", "cuda") == waits() == (0, 0), "the host waits without a reason"
    assert waits("cuda", "cpu") == (1, 1), "the host must wait for the copy"
    if not hasattr(MoETransformerLayer, "_synchronize_router_host_outputs"):  # takes tensors only
        assert waits("cuda", None) == (1, 1), "nobody knows where the value is"
