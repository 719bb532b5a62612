"""DDP and weight gradients that are computed after their layer's backward."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from cppmega.catalogue import loader as catalogue
from tests.upstream_patches import one_process

torch = pytest.importorskip("torch")

PAGE = "delayed_wgrad_hooks"


@pytest.mark.megatron
@pytest.mark.parametrize("version", one_process.PAGES[PAGE])
def test_main_gradients(version: str) -> None:
    one_process.assert_passes(PAGE, version)


def check(stock: one_process.Stock) -> None:
    from megatron.core.distributed import distributed_data_parallel as patched

    from cppmega.proof import cpu_shims

    cpu_shims.init_distributed()
    unpatched = stock.module("megatron.core.distributed.distributed_data_parallel")
    for fused in (False, True):
        # Two microbatches with the same gradient, which is exact in binary.
        at_once, _ = trained(patched, delayed=False, fused=fused)
        for by_config in (False, True):
            found, ready = trained(patched, delayed=True, fused=fused, by_config=by_config)
            assert torch.equal(found, at_once), (fused, by_config, found)
            assert [given.tolist() for given in ready] == [(at_once / 2).tolist(), at_once.tolist()]
    wrong, _ = trained(unpatched, delayed=True, fused=False)
    assert torch.isnan(wrong).all()
    # With fused accumulation the gradient arrives, but after the bucket has been reduced.
    late, ready = trained(unpatched, delayed=True, fused=True)
    assert torch.equal(late, at_once)
    assert [given.tolist() for given in ready] == [(at_once * 0).tolist(), (at_once / 2).tolist()]
    if "is_gtp_weight_remat" in inspect.getsource(unpatched):  # since 0.19
        weights_of_gtp_keep_their_hook(patched)


def weights_of_gtp_keep_their_hook(module: Any) -> None:
    """Assert that a weight that calls DDP's hook itself does not hand it to the MoE layer."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    layer = Layer(delayed=True, fused=True)
    weight, hooks = layer.experts.weight, []
    weight.is_gtp_weight_remat = True
    weight.register_grad_accum_hook = lambda node, hook: hooks.append(hook)
    config = TransformerConfig(num_layers=1, hidden_size=3, num_attention_heads=1)
    ddp = module.DistributedDataParallel(config, DistributedDataParallelConfig(), layer)
    assert not hasattr(weight, "post_wgrad_grad_acc_hook")
    assert len(hooks) == 1 and not ddp.grad_accs


def trained(
    module: Any, *, delayed: bool, fused: bool, by_config: bool = False
) -> tuple[Any, list[Any]]:
    """The main gradient of two microbatches, and its value whenever it was reported ready."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    layer = Layer(delayed, fused)
    ddp = module.DistributedDataParallel(
        TransformerConfig(num_layers=1, hidden_size=3, num_attention_heads=1),
        DistributedDataParallelConfig(overlap_grad_reduce=True, delay_wgrad_compute=by_config),
        layer,
    )
    ddp.zero_grad_buffer()
    weight = layer.experts.weight
    ready: list[Any] = []
    (group,) = ddp.bucket_groups
    stream = SimpleNamespace(wait_event=lambda event: None)
    with (
        mock.patch.object(torch.cuda, "current_stream", lambda: stream),
        mock.patch.object(torch.cuda, "stream", mock.MagicMock()),
        mock.patch.object(
            group, "register_grad_ready", lambda *_: ready.append(weight.main_grad.clone())
        ),
    ):
        for _ in range(2):
            x = torch.tensor([[1.0, 2.0, 3.0], [0.5, -1.0, 4.0]], requires_grad=True)
            (ddp(x) * torch.tensor([1.0, 3.0])).sum().backward()
    return weight.main_grad.clone(), ready


class Experts(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A linear layer whose weight gradient may be delayed, as in Transformer Engine's layers."""

    def __init__(self, delayed: bool, fused: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
        self.delayed, self.fused = delayed, fused
        self.hooks: list[Any] = []
        self.kept: Any = None
        if delayed:
            self.weight.skip_backward_post_hook = True

    def forward(self, x: Any) -> Any:
        return Product.apply(x, self.weight, self)

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Any) -> None:
        self.hooks.append(hook)

    def backward_dw(self) -> None:
        if self.delayed:
            self.finish(self.kept)
            for hook in self.hooks:
                hook()

    def finish(self, gradient: Any) -> Any:
        """Add it to the main gradient or set it as the weight's; return what autograd receives."""
        if not self.fused:
            self.weight.grad = gradient
            return gradient
        self.weight.main_grad += gradient
        return torch.full_like(gradient, torch.nan)


class Product(torch.autograd.Function):  # type: ignore[misc]
    """`x @ weight.t()`."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, experts: Experts) -> Any:
        ctx.x, ctx.experts = x, experts
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, given: Any) -> tuple[Any, Any, None]:
        experts, weight = ctx.experts, ctx.experts.weight
        gradient = given.t() @ ctx.x
        if experts.fused:
            weight.grad_added_to_main_grad = True
        if experts.delayed:
            experts.kept = gradient
            return given @ weight, torch.full_like(weight, torch.nan), None
        return given @ weight, experts.finish(gradient) if experts.fused else gradient, None


class Layer(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Experts after Megatron's own function that computes the delayed gradients."""

    def __init__(self, delayed: bool, fused: bool) -> None:
        super().__init__()
        self.experts = Experts(delayed, fused)
        self._delayed_wgrad_event = SimpleNamespace(record=lambda stream: None)
        self._delayed_wgrad_stream = SimpleNamespace(wait_event=lambda event: None)

    def backward_dw(self, routed_experts: bool, shared_experts: bool) -> None:
        assert routed_experts and not shared_experts
        self.experts.backward_dw()

    def forward(self, x: Any) -> Any:
        from megatron.core.transformer.moe.moe_layer import _RegisterDelayedWgradForExperts

        return self.experts(_RegisterDelayedWgradForExperts.apply(self, x))


def test_which_runs_must_reach_it() -> None:
    when = catalogue.load()[PAGE].patch.when
    run = {"overlap_dispatch_backward_with_experts_wgrad": True, "num_experts": 8}
    assert when is not None and when(SimpleNamespace(**run))
    for other in (
        {"overlap_dispatch_backward_with_experts_wgrad": False},
        {"num_experts": None},
        {"use_megatron_fsdp": True},
        {"use_torch_fsdp2": True},
        {"skip_train": True},
    ):
        assert not when(SimpleNamespace(**(run | other))), other
