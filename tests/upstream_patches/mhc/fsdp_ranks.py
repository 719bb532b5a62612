"""Models with hyper-connections under Megatron-FSDP, against DDP, on two ranks without GPUs.

Imported in the processes that run a tree, never by pytest itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from megatron.core import optimizer as optimizers
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.fsdp import mcore_fsdp_adapter as adapter
from megatron.core.distributed.fsdp.src.megatron_fsdp import megatron_fsdp, param_and_grad_buffer
from megatron.core.transformer.module import Float16Module
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cppmega.proof.small_models import arguments
from tests.upstream_patches.mhc import mhc_models as models
from tests.upstream_patches.mhc.offload_checks import Queue
from tests.upstream_patches.optimizer.distributed_optimizer import on_cpu

CASES = {
    "gpt, biases, recomputed streams": partial(models.gpt, 2, 1, **models.SELECTIVE),
    "hybrid": partial(models.hybrid, "M*-E/*-", **models.EXPERTS),
}
TYPES = {"bf16": True, "params_dtype": torch.bfloat16}
STEPS = 3


def _gathered(output_tensor: Any, input_tensor: Any, group: Any, **ignored: Any) -> Queue:
    parts = [torch.empty_like(input_tensor) for _ in range(group.size())]
    distributed.all_gather(parts, input_tensor.contiguous(), group=group)
    output_tensor.copy_(torch.cat(parts).view_as(output_tensor))
    return Queue()


def _scattered(output: Any, input: Any, group: Any, **ignored: Any) -> None:  # noqa: A002
    total = input.detach().clone().flatten()
    distributed.all_reduce(total, group=group)
    output.copy_(total.chunk(group.size())[group.rank()].view_as(output))


@contextlib.contextmanager
def on_gloo() -> Iterator[None]:
    """Let Megatron-FSDP run on CPU ranks.

    gloo lacks its reductions, and joins collectives that are coalesced in one tensor, of one type.
    """
    mesh = DeviceMesh.from_group

    def on_host(groups: Any, device_type: str, **named: Any) -> Any:
        return mesh(groups, "cpu", **named)

    # It asks for `torch.device("cuda:0")`, but for no other device.
    torch_on_cpu = SimpleNamespace(**vars(torch))
    torch_on_cpu.device = lambda *given: torch.device("cpu")
    ranks = torch.arange(distributed.get_world_size())[:, None]
    replaced: tuple[tuple[Any, str, Any], ...] = (
        *((torch.cuda, name, Queue) for name in ("Stream", "Event", "current_stream")),
        (torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
        (torch.cuda, "empty_cache", lambda: None),
        (torch.Tensor, "record_stream", lambda *given: None),
        (DeviceMesh, "from_group", staticmethod(on_host)),
        (adapter, "_get_dp_tp_mesh", lambda *given, **named: ranks),  # which needs einops
        *((module, "torch", torch_on_cpu) for module in (adapter, megatron_fsdp)),
        (
            param_and_grad_buffer,
            "_coalescing_manager",
            lambda *given, **named: contextlib.nullcontext(Queue()),
        ),
        (distributed, "all_gather_into_tensor", _gathered),
        (distributed, "reduce_scatter_tensor", _scattered),
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(on_cpu())
        for where, name, by in replaced:
            stack.enter_context(mock.patch.object(where, name, by))
        yield


def whole(parameter: Any) -> torch.Tensor:
    """All elements of a parameter, of which FSDP leaves each rank a part, in their order."""
    own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    parts: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(parts, own.detach().flatten())
    return torch.cat(parts) if isinstance(parameter, DTensor) else parts[0]


def trained(make: Callable[..., Any], sharded: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of a bf16 model, whose sites stay in fp32, on batches of this rank's own, and its
    parameters after them."""
    model = make(gradient_accumulation_fusion=False, **models.MHC, **TYPES)
    options = {
        **{"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"},
        **{"overlap_grad_reduce": True, "overlap_param_gather": True},
    }
    wrapper = adapter.FullyShardedDataParallel if sharded else DistributedDataParallel
    ddp = wrapper(
        model.config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            gradient_reduce_div_fusion=False,
            **(options if sharded else {}),
        ),
        Float16Module(model.config, model),
    )
    adam = optimizers.OptimizerConfig(
        optimizer="adam", lr=1e-2, use_distributed_optimizer=True, **TYPES
    )
    optimizer = optimizers.get_megatron_optimizer(adam, [ddp])
    losses = []
    for step in range(STEPS):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        batch = models.batch(2 * step + distributed.get_rank())
        loss = ddp(**arguments(model, **batch)).float().mean()
        loss.backward()
        ddp.finish_grad_sync()
        optimizer.step()
        losses.append(loss.item())
    parameters = ddp.named_parameters()
    return losses, {name.replace("module.", ""): whole(each) for name, each in parameters}


def sharded() -> dict[str, Any]:
    """Losses with DDP and with FSDP, of each case, and how far their parameters are apart then."""
    found = {}
    with on_gloo():
        for name, make in CASES.items():
            (losses, plain), (others, parts) = (trained(make, each) for each in (False, True))
            apart = max(float((plain[each] - parts[each]).abs().max()) for each in plain)
            found[name] = [losses, others, apart]
    return found
