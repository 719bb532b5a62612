"""Local CUDA graphs of a layer that recomputes a part of itself.

Without a GPU nothing is captured. What a graph would record runs once instead, and the gradients
that it returns are compared with a plain backward pass.
"""

from __future__ import annotations

import re
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.support.laws import pages
from tests.upstream_patches import one_process

torch = pytest.importorskip("torch")

PAGE = "local_graph_hidden_parameters"


@pytest.mark.megatron
@pytest.mark.parametrize("version", one_process.PAGES[PAGE])
def test_gradients(version: str) -> None:
    one_process.assert_passes(PAGE, version)


@pytest.mark.parametrize(
    ("forward", "backward", "fixed"),
    [
        ("self.get_connected_params(fwd_graph_outputs)", "", False),
        ("self.get_connected_params(warmup_outputs)", "param.main_grad.add_(param.grad)", False),
        ("self.get_connected_params(warmup_outputs)", "param.grad = None", True),
    ],
    ids=["0.19", "main", "fixed"],
)
def test_main_has_half_of_the_fix(forward: str, backward: str, fixed: bool) -> None:
    texts = {
        "_set_warmup_end": "= False",
        "create_fwd_graph": forward,
        "create_bwd_graph": backward,
    }
    source: Any = SimpleNamespace(text=lambda target: texts[re.split("[.:]", target)[-1]])
    fixed_upstream = pages()[PAGE].fixed_upstream
    assert fixed_upstream is not None and fixed_upstream(source) is fixed


def check(stock: one_process.Stock) -> None:
    from megatron.core.transformer import cuda_graphs as patched

    from cppmega.proof import cpu_shims

    cpu_shims.shim()
    unpatched = stock.module("megatron.core.transformer.cuda_graphs")
    expected = gradients_of(layer_of(patched))
    for earlier in (None, 5.0):  # somebody else's gradient stays as it was
        for steps in (0, 2):
            assert handed_out(patched, steps, "selective", earlier) == expected
    assert handed_out(patched, 1, None) == handed_out(unpatched, 1, None)
    lost = handed_out(unpatched, 1, "selective")
    assert lost["norm.weight"] is lost["norm.bias"] is None
    assert lost["after.weight"] != expected["after.weight"], "half of it is hidden"


def layer_of(graphs: Any) -> Any:
    """Return a layer with a norm and a projection that are recomputed, and another projection."""

    class Recomputed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, module: Any, x: Any) -> Any:
            ctx.module = module
            ctx.save_for_backward(x)
            return module(x)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                torch.autograd.backward(ctx.module(x), grads[0])
            return None, x.grad

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.norm = torch.nn.LayerNorm(3)
            self.after = torch.nn.Linear(3, 3, bias=False)
            self.config = SimpleNamespace(recompute_granularity=None)

        def forward(self, x: Any) -> Any:
            inside = torch.nn.Sequential(self.norm, self.after)
            recomputes = self.config.recompute_granularity and not graphs.is_graph_warmup()
            inner = Recomputed.apply(inside, x) if recomputes else inside(x)
            return self.after(inner)

    return Layer()


def numbers(*shape: int) -> Any:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)


def gradients_of(layer: Any) -> dict[str, Any]:
    layer(numbers(1, 3)).backward(numbers(1, 3))
    return {name: param.grad.tolist() for name, param in layer.named_parameters()}


def handed_out(
    graphs: Any, warmup_steps: int, granularity: str | None, earlier: float | None = None
) -> dict[str, Any]:
    """Return the gradients from a layer's graphs; None for a parameter that they do not know."""
    layer = layer_of(graphs)
    layer.config.recompute_granularity = granularity
    for param in layer.parameters():
        param.main_grad, param.grad_added_to_main_grad = torch.zeros_like(param), False
        param.grad = None if earlier is None else torch.full_like(param, earlier)
    runner = runner_of(graphs, layer)
    runner.num_warmup_steps = warmup_steps
    x = numbers(1, 3).requires_grad_()
    with ExitStack() as stack:
        for where, name, stand_in in stand_ins(graphs):
            stack.enter_context(mock.patch.object(where, name, stand_in, create=True))
        runner.create_fwd_graph(
            (described(graphs, x, "input"),), {}, (described(graphs, x, "output"),)
        )
        runner.create_bwd_graph()
    names = {id(param): name for name, param in layer.named_parameters()}
    known = [names[id(param)] for param in runner.params_to_backprop]
    returned = runner.static_grad_inputs[1:]  # to autograd, until 0.18
    grads = returned or [param.main_grad for param in runner.params_to_backprop]
    if granularity is None or len(known) == len(names):
        kept = {None if p.grad is None else float(p.grad.mean()) for p in layer.parameters()}
        assert kept == {earlier}
    found = dict.fromkeys(names.values()) | dict(zip(known, grads, strict=True))
    return {name: None if grad is None else grad.tolist() for name, grad in found.items()}


def runner_of(graphs: Any, layer: Any) -> Any:
    runner = graphs._CudaGraphRunner.__new__(graphs._CudaGraphRunner)
    torch.nn.Module.__init__(runner)
    off = ("fp8_enabled", "fp4_enabled", "gtp_remat", "use_stream", "backward_retain_grad")
    for name in (*off, "is_last_layer", "fuse_wgrad_accumulation"):
        setattr(runner, name, False)
    runner.base_module, runner.func, runner.mempool = layer, layer.forward, None
    runner.grad_enabled, runner.get_quantization_context = True, nullcontext
    runner.fwd_side_streams = runner.bwd_side_streams = ()
    return runner


def described(graphs: Any, tensor: Any, kind: str) -> Any:
    meta = graphs.ArgMetadata(tensor)
    meta.cg_buffer_metadata = graphs.CudagraphBufferMetadata(**{f"is_cudagraph_{kind}": True})
    return meta


def stand_ins(graphs: Any) -> list[tuple[Any, str, Any]]:
    """Replace graphs and their memory: the code runs instead of being captured."""

    def buffer(meta: Any) -> Any:
        return numbers(*meta.shape).requires_grad_(meta.requires_grad)

    return [
        (torch.cuda, "CUDAGraph", mock.Mock()),
        (torch.cuda, "graph", lambda *_, **__: nullcontext()),
        (torch.cuda, "device_count", lambda: 0),
        (graphs, "get_all_rng_states", dict),
        (graphs, "alloc_tensor_from_graph_mempool", buffer),
        (graphs, "_backup_grads_before_capture", lambda _: {}),
        (graphs, "is_graph_capturing", lambda: True),
        (graphs._CudagraphGlobalRecord, "tensor_reuse_pool", mock.Mock(get=buffer)),
    ]
