"""Use the delayed weight gradients of experts instead of uninitialized memory.

What: With `--overlap-dispatch-backward-with-experts-wgrad`, Megatron's DDP accumulates and reduces
    the gradient of an expert's weight after the layer has computed it.
Why: Transformer Engine returns an uninitialized tensor in place of a delayed gradient. DDP waits
    for the real one only if its own config has `delay_wgrad_compute`, which this argument does not
    set. Without fused accumulation, DDP adds the uninitialized tensor to the main gradient, and the
    last real gradient is dropped, so that experts are trained on whatever the memory contained: the
    slice of NAM56R had NaN in 12 of 175 parameters in its second step (0.19.2, one H200), and only
    the check for NaN stopped it. With fused accumulation and `--overlap-grad-reduce`, buckets are
    reduced before the gradients are in them.
Upstream: Not sent: found here. Megatron tests the argument only without DDP, or with FSDP, which
    has its own hooks.
Remove: when DDP registers the hooks of delayed weights whichever argument delays them.
Numerics: changes results: of runs with the argument, whose experts now receive their gradients
"""

from typing import Any

from cppmega.catalogue.megatron_args import has_experts, uses_fsdp
from cppmega.edits import replacing
from cppmega.page import Edit, Patch, Source

TARGET = "megatron/core/distributed/distributed_data_parallel.py:DistributedDataParallel.__init__"
LAYER = "megatron/core/transformer/moe/moe_layer.py:_RegisterDelayedWgradForExperts"


def delays(args: Any) -> bool:
    """Whether the run delays the experts' weight gradients under Megatron's DDP."""
    return (
        bool(getattr(args, "overlap_dispatch_backward_with_experts_wgrad", False))
        and has_experts(args)
        and not uses_fsdp(args)
        and not getattr(args, "skip_train", False)
    )


PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=TARGET,
            pins={
                "0.18.2": "230f3ca64701bf97",
                "0.19.2": "86af3213e2334560",
                "main-d98e8a64": "e4a09358f355d2e3",
                "dev-d48bd6be": "a4b701899526b7d5",
            },
            edit=replacing(
                "grad_acc.register_hook(self._make_backward_post_hook(param))",
                """
                if getattr(param, 'skip_backward_post_hook', False):
                    # The MoE layer calls it once the gradients' stream has finished.
                    param.post_wgrad_grad_acc_hook = self._make_backward_post_hook(param)
                else:
                    grad_acc.register_hook(self._make_backward_post_hook(param))
                """,
            ),
        ),
    ),
    reached="startup",
    feature=(LAYER,),
    when=delays,
)


def fixed_upstream(source: Source) -> bool:
    text = source.text(TARGET)
    return bool(text) and "self.ddp_config.delay_wgrad_compute and getattr" not in text


def verify() -> None:
    from types import SimpleNamespace
    from unittest import mock

    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe.moe_layer import _RegisterDelayedWgradForExperts

    from cppmega.proof import cpu_shims

    cpu_shims.shim()
    cpu_shims.init_distributed()

    class Delayed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, experts):  # type: ignore[no-untyped-def]
            ctx.experts, ctx.x = experts, x
            return x @ weight.t()

        @staticmethod
        def backward(ctx, given):  # type: ignore[no-untyped-def]
            weight = ctx.experts.weight
            ctx.experts.delayed = given.t() @ ctx.x
            return given @ weight, torch.full_like(weight, torch.nan), None  # not yet written

    class Experts(torch.nn.Module):
        """Delay the gradient of a weight, and mark it, as Transformer Engine's layers do."""

        def __init__(self):  # type: ignore[no-untyped-def]
            super().__init__()
            self.weight = torch.nn.Parameter(torch.eye(2))
            self.weight.skip_backward_post_hook = True

        def register_wgrad_accumulation_and_reduce_hooks(self, hook):  # type: ignore[no-untyped-def]
            raise AssertionError("this gradient is not delayed by delay_wgrad_compute")

        def backward_dw(self, **_):  # type: ignore[no-untyped-def]
            self.weight.grad = self.delayed

    class Layer(torch.nn.Module):
        def __init__(self):  # type: ignore[no-untyped-def]
            super().__init__()
            self.norm = torch.nn.Parameter(torch.ones(2))
            self.experts = Experts()
            self.backward_dw = self.experts.backward_dw
            self._delayed_wgrad_event = SimpleNamespace(record=lambda stream: None)
            self._delayed_wgrad_stream = SimpleNamespace(wait_event=lambda event: None)

        def forward(self, x):  # type: ignore[no-untyped-def]
            x = _RegisterDelayedWgradForExperts.apply(self, x * self.norm)
            return Delayed.apply(x, self.experts.weight, self.experts)

    layer = Layer()
    config = TransformerConfig(num_layers=1, hidden_size=2, num_attention_heads=1)
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), layer)
    ddp.zero_grad_buffer()
    stream = SimpleNamespace(wait_event=lambda event: None)
    with (
        mock.patch.object(torch.cuda, "current_stream", lambda: stream),
        mock.patch.object(torch.cuda, "stream", mock.MagicMock()),
    ):
        for _ in range(2):
            ddp(torch.tensor([[1.0, 2.0]], requires_grad=True)).sum().backward()
    found = layer.experts.weight.main_grad.tolist()
    assert found == [[2, 4], [2, 4]], f"the experts' gradients of two microbatches: {found}"
    found = layer.norm.main_grad.tolist()
    assert found == [2, 4], f"a gradient that is not delayed, of two microbatches: {found}"
