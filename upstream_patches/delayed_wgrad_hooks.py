"""Use the delayed weight gradients of experts, instead of memory that was never written.

What: With `--overlap-dispatch-backward-with-experts-wgrad`, Megatron's DDP takes the gradient of an
    expert's weight after the layer has computed it.
Why: Transformer Engine returns an empty tensor in the place of a gradient that is delayed. DDP
    waits for the real one only if its own config says `delay_wgrad_compute`, which this argument
    does not set. Without fused accumulation it adds the empty tensor to the main gradient and
    drops the real one, so that experts are trained on whatever the memory contained: the slice of
    NAM56R had NaN in 12 of 175 parameters in the second step (0.19.2, one H200), and without the
    check for NaN nothing would have stopped it. With fused accumulation and
    `--overlap-grad-reduce`, buckets are reduced before the gradients are in them.
Upstream: Not sent: found here. Megatron's tests of the argument use no DDP, or FSDP, which has
    hooks of its own.
Remove: when DDP registers the hooks of delayed weights whichever argument delays them.
Numerics: changes results: of runs with the argument, whose experts now receive their gradients
"""

from typing import Any

from cppmega.catalogue.megatron_args import has_experts
from cppmega.edits import in_order, replacing
from cppmega.page import Edit, Patch, Source

TARGET = "megatron/core/distributed/distributed_data_parallel.py:DistributedDataParallel.__init__"
LAYER = "megatron/core/transformer/moe/moe_layer.py:_RegisterDelayedWgradForExperts"
WRONG = "self.ddp_config.delay_wgrad_compute and getattr(param, 'skip_backward_post_hook', False)"


def delays(args: Any) -> bool:
    """Whether the run delays the experts' weight gradients, under this DDP."""
    return (
        bool(getattr(args, "overlap_dispatch_backward_with_experts_wgrad", False))
        and has_experts(args)
        and not getattr(args, "use_megatron_fsdp", False)
        and not getattr(args, "skip_train", False)
    )


PATCH = Patch(
    edits=(
        Edit(
            target=TARGET,
            pins={
                "0.18.2": "230f3ca64701bf97",
                "0.19.2": "86af3213e2334560",
                "main-d98e8a64": "e4a09358f355d2e3",
                "dev-d48bd6be": "a4b701899526b7d5",
            },
            edit=in_order(
                replacing(WRONG, "getattr(param, 'skip_backward_post_hook', False)"),
                replacing(
                    """
                    module.register_wgrad_accumulation_and_reduce_hooks(
                        self._make_backward_post_hook(param)
                    )
                    """,
                    """
                    if self.ddp_config.delay_wgrad_compute:
                        module.register_wgrad_accumulation_and_reduce_hooks(
                            self._make_backward_post_hook(param)
                        )
                    else:
                        # The MoE layer calls it, after it has waited for the gradients' stream.
                        param.post_wgrad_grad_acc_hook = self._make_backward_post_hook(param)
                    """,
                ),
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
            raise AssertionError("no one delays this one's gradient by delay_wgrad_compute")

        def backward_dw(self, **_):  # type: ignore[no-untyped-def]
            self.weight.grad = self.delayed

    class Layer(torch.nn.Module):
        def __init__(self):  # type: ignore[no-untyped-def]
            super().__init__()
            self.experts = Experts()
            self.backward_dw = self.experts.backward_dw
            self._delayed_wgrad_event = SimpleNamespace(record=lambda stream: None)
            self._delayed_wgrad_stream = SimpleNamespace(wait_event=lambda event: None)

        def forward(self, x):  # type: ignore[no-untyped-def]
            x = _RegisterDelayedWgradForExperts.apply(self, x)
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
    assert found == [[2, 4], [2, 4]], f"the gradients of two microbatches of experts: {found}"
