"""Compute the gradients of recomputed parameters under local CUDA graphs.

What: With `--cuda-graph-impl local` and recomputation, the graphs of a layer are created for the
    parameters that the warm-up reaches, and return what a nested backward pass left in
    `param.grad`, and nothing else that is in there. On main, every graph of a layer adds its
    gradients.
Why: The parameters of a graph are found from the outputs of its capture, and modules that are
    recomputed there (`layernorm`, `mla_up_proj`) hide theirs. Their gradients stay in `param.grad`
    at capture, where nothing reads them: replays leave the weights of these norms and projections
    without a gradient, and `--overlap-grad-reduce` waits for parameters that never become ready
    (seen on CPU, where the code ran instead of being captured, 0.17.1 to 0.19.2). On 0.16 the
    warm-up never ends, so nothing is recomputed and nothing is lost; 0.15 raises an exception. Main
    finds the parameters, but leaves `param.grad` as it is after a capture, and marks every gradient
    as added. With pipeline parallelism, a layer has a graph for each micro-batch in flight, and
    those after the first add only what fused kernels add (seen on CPU, d98e8a64).
Upstream: https://github.com/NVIDIA/Megatron-LM/pull/6373 (in part: main finds the
    parameters, and keeps what is left in `param.grad`)
Remove: when `create_fwd_graph` finds the parameters from the outputs of the warm-up, and
    `create_bwd_graph` clears `param.grad` and marks nothing.
Numerics: changes results of runs with local CUDA graphs and selective recomputation, and on main of
    all runs with local CUDA graphs and pipeline parallelism
"""

from cppmega.edits import in_order, inserting, replacing
from cppmega.page import Edit, Patch, Source, left_alone

FILE = "megatron/core/transformer/cuda_graphs.py"
RUNNER = f"{FILE}:_CudaGraphRunner"
BACKWARD = """
grad_inputs = torch.autograd.grad(
    outputs=tuple(o for o in self.fwd_graph_output_surface if o.requires_grad),
    inputs=tuple(i for i in self.fwd_graph_input_surface if i.requires_grad),
    grad_outputs=tuple(o for o in self.static_grad_outputs if o is not None),
    retain_graph=self.backward_retain_grad,
    only_inputs=True,
    allow_unused=True,
)
"""
CLEARED = inserting(
    """
    # What a nested backward leaves in `param.grad` must not mix with what is there.
    earlier_grads = [param.grad for param in self.params_to_backprop]
    for param in self.params_to_backprop:
        param.grad = None
    """,
    before=BACKWARD,
)
WITH_HIDDEN = in_order(
    CLEARED,
    inserting(
        """
        grad_inputs = list(grad_inputs)
        first = len(grad_inputs) - len(self.params_to_backprop)
        for at, param in enumerate(self.params_to_backprop, first):
            hidden, param.grad = param.grad, earlier_grads[at - first]
            if hidden is not None:
                wgrad = grad_inputs[at]
                grad_inputs[at] = hidden if wgrad is None else wgrad + hidden
        """,
        after=BACKWARD,
    ),
)
ONLY_HIDDEN = in_order(
    CLEARED,
    replacing(
        "param.grad_added_to_main_grad = True",
        """
        # That this graph adds a gradient says nothing about the other graphs of its layer.
        param.grad = earlier_grads.pop(0)
        """,
    ),
)
FROM_WARMUP = in_order(
    inserting(
        """
        # Nothing is recomputed in a warm-up, so its outputs hide no parameter.
        recomputes = (
            self.grad_enabled
            and getattr(self.base_module.config, "recompute_granularity", None) is not None
        )
        """,
        before="ctx = torch.no_grad() if not self.grad_enabled else nullcontext()",
    ),
    replacing(
        "for _ in range(self.num_warmup_steps):",
        "for _ in range(max(self.num_warmup_steps, int(recomputes))):",
    ),
    replacing(
        "self.get_connected_params(fwd_graph_outputs)",
        "self.get_connected_params(warmup_outputs if recomputes else fwd_graph_outputs)",
    ),
)

PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=f"{RUNNER}.create_fwd_graph",
            pins={
                "0.17.1": "2a7135d07eccb866",
                "0.18.2": "2cee9bf3883a5fb2",
                "0.19.2": "f326d886e209a01c",
                "dev-d48bd6be": "f16a5d7c84e36c43",
            },
            edit=FROM_WARMUP,
        ),
        Edit(
            target=f"{RUNNER}.create_fwd_graph",
            pins={"main-d98e8a64": "ede9e03031b935ef"},
            edit=left_alone,
        ),
        Edit(
            target=f"{RUNNER}.create_bwd_graph",
            pins={
                "0.17.1": "cf0ff2ee2cd008e3",
                "0.18.2": "cd633cc57074675b",
                "0.19.2": "efda9f87da913077",
                "dev-d48bd6be": "383851bdbc267bda",
            },
            edit=WITH_HIDDEN,
        ),
        Edit(
            target=f"{RUNNER}.create_bwd_graph",
            pins={"main-d98e8a64": "49a04470fcec4e03"},
            edit=ONLY_HIDDEN,
        ),
    ),
    reached="never",  # graphs are created after the first step, and only in few runs
    feature=(f"{RUNNER}.get_connected_params",),
)


def fixed_upstream(source: Source) -> bool:
    # In 0.16 the warm-up never ends: nothing is recomputed, so nothing is hidden.
    end = source.text(f"{FILE}:_set_warmup_end")
    always_warm = bool(end) and "= False" not in end
    found = "get_connected_params(warmup_outputs)" in source.text(f"{RUNNER}.create_fwd_graph")
    return always_warm or (found and ".grad = None" in source.text(f"{RUNNER}.create_bwd_graph"))


def verify() -> None:
    from contextlib import ExitStack, nullcontext
    from types import SimpleNamespace
    from unittest import mock

    import torch
    from megatron.core.transformer import cuda_graphs

    from cppmega.proof import cpu_shims

    cpu_shims.shim()

    class Recomputed(torch.autograd.Function):
        """A linear layer that is not part of the autograd graph itself."""

        @staticmethod
        def forward(ctx, linear, x):  # type: ignore[no-untyped-def]
            ctx.linear = linear
            ctx.save_for_backward(x)
            return linear(x)

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                y = ctx.linear(x)
            torch.autograd.backward(y, grad)
            return None, x.grad

    class Layer(torch.nn.Module):
        config = SimpleNamespace(recompute_granularity="selective")

        def __init__(self):  # type: ignore[no-untyped-def]
            super().__init__()
            self.inner, self.outer = (torch.nn.Linear(2, 2, bias=False) for _ in range(2))

        def forward(self, x):  # type: ignore[no-untyped-def]
            plain = cuda_graphs.is_graph_warmup()
            return self.outer(self.inner(x) if plain else Recomputed.apply(self.inner, x))

    def described(tensor, **kind):  # type: ignore[no-untyped-def]
        meta = cuda_graphs.ArgMetadata(tensor)
        meta.cg_buffer_metadata = cuda_graphs.CudagraphBufferMetadata(**kind)
        return (meta,)

    def buffer(meta):  # type: ignore[no-untyped-def]
        return torch.ones(meta.shape, requires_grad=meta.requires_grad)

    layer, x = Layer(), torch.ones(1, 2, requires_grad=True)

    def graph():  # type: ignore[no-untyped-def]
        runner = cuda_graphs._CudaGraphRunner.__new__(cuda_graphs._CudaGraphRunner)
        torch.nn.Module.__init__(runner)
        off = ("fp8_enabled", "fp4_enabled", "gtp_remat", "use_stream", "backward_retain_grad")
        for name in (*off, "is_last_layer", "fuse_wgrad_accumulation"):
            setattr(runner, name, False)
        runner.base_module, runner.func, runner.mempool = layer, layer.forward, None
        runner.grad_enabled = runner.needs_recompute_param_discovery = True
        runner.num_warmup_steps, runner.get_quantization_context = 0, nullcontext
        runner.fwd_side_streams = runner.bwd_side_streams = ()
        given, returned = (
            described(x, is_cudagraph_input=True),
            described(x, is_cudagraph_output=True),
        )
        runner.create_fwd_graph(given, {}, returned)
        runner.create_bwd_graph()
        return runner

    for param in layer.parameters():
        param.main_grad, param.grad_added_to_main_grad = torch.zeros_like(param), False

    # Without graphs and their memory: the code runs, on ones, instead of being captured.
    stand_ins = [
        (torch.cuda, "CUDAGraph", mock.Mock()),
        (torch.cuda, "graph", lambda *_, **__: nullcontext()),
        (torch.cuda, "device_count", lambda: 0),
        (cuda_graphs, "get_all_rng_states", dict),
        (cuda_graphs, "alloc_tensor_from_graph_mempool", buffer),
        (cuda_graphs, "_backup_grads_before_capture", lambda _: {}),
        (cuda_graphs, "is_graph_capturing", lambda: True),
        (cuda_graphs._CudagraphGlobalRecord, "tensor_reuse_pool", mock.Mock(get=buffer)),
    ]
    with ExitStack() as stack:
        for where, name, stand_in in stand_ins:
            stack.enter_context(mock.patch.object(where, name, stand_in, create=True))
        runners = [graph(), graph()]  # two micro-batches are in flight

    left = [param.grad for param in layer.parameters()]
    layer.zero_grad()
    layer.outer(layer.inner(torch.ones(1, 2))).sum().backward()
    for runner in runners:
        assert [*map(id, runner.params_to_backprop)] == [*map(id, layer.parameters())]
    # Gradients are handed to autograd until 0.18, and added up since.
    handed_out = [runner.static_grad_inputs[1:] for runner in runners]
    for at, param in enumerate(layer.parameters()):
        got = [grads[at] for grads in handed_out] if handed_out[0] else [param.main_grad / 2]
        assert all(torch.equal(each, param.grad) for each in got), (got, param.grad)
    assert left == [None, None], "the next graph would add the gradients of this one"
