"""Models with hyper-connections whose activations go to the host, which here is another copy.

Imported in the process that runs a tree, never by pytest itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from megatron.core.extensions import transformer_engine
from megatron.core.pipeline_parallel import fine_grained_activation_offload as offload
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import transformer_block
from torch.autograd.graph import saved_tensors_hooks

from cppmega.proof.small_models import arguments
from tests.upstream_patches.mhc import mhc_models as models
from tests.upstream_patches.mhc.mhc_checks import MAKE, gpt
from tests.upstream_patches.optimizer.distributed_optimizer import on_cpu

INSIDE = ["qkv_linear", "core_attn", "attn_proj"]
STEPS = 2
"""Megatron decides in the first what goes to the host in the next ones."""

Steps = list[tuple[list[float], list[torch.Tensor]]]


class Queue:
    """Replaces streams, events and handles: everything is done when it is asked for."""

    def __init__(self, *given: Any, **named: Any) -> None:
        pass

    def __getattr__(self, name: str) -> type[Queue]:
        return Queue  # what is called returns one


@contextlib.contextmanager
def on_host(moved: list[int]) -> Iterator[None]:
    """Let Megatron offload tensors of the CPU, and note the size of each."""
    handler = offload.ChunkOffloadHandler
    move = handler.offload

    def noting(self: Any, tensor: torch.Tensor, **named: Any) -> Any:
        moved.append(tensor.numel())
        return move(self, tensor, **named)

    def managed(tensor: torch.Tensor) -> bool:
        return not isinstance(tensor, torch.nn.Parameter)

    replaced: tuple[tuple[Any, str, Any], ...] = (
        *((torch.cuda, name, Queue) for name in ("Stream", "Event", "current_stream")),
        (torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
        (torch.Tensor, "record_stream", lambda *given: None),
        (transformer_engine, "cpu_offload", SimpleNamespace()),
        (handler, "_can_manage_tensor_for_offload", staticmethod(managed)),
        (handler, "offload", noting),
    )
    with contextlib.ExitStack() as stack:
        for where, name, by in replaced:
            stack.enter_context(mock.patch.object(where, name, by))
        offload.PipelineOffloadManager.reset_instance()
        yield


def stepped(model: Any) -> Steps:
    """Losses and gradients of a few steps by Megatron's schedule."""

    def forward(seeds: Iterator[int], model: Any) -> Any:
        out = model(**arguments(model, **models.batch(next(seeds))))
        return out, lambda per_token: (per_token.mean(), per_token.detach().mean().item())

    steps = []
    for _ in range(STEPS):
        model.zero_grad()
        with on_cpu():
            losses = get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iter((1, 2)),
                model=[model],
                num_microbatches=2,
                seq_length=models.LENGTH,
                micro_batch_size=models.BATCH,
                forward_only=False,
            )
        steps.append((losses, [p.grad.clone() for p in model.parameters()]))
    return steps


def apart(one: Steps, other: Steps) -> float:
    """The largest difference of losses and gradients."""
    return max(
        max(abs(a - b) for a, b in zip(losses, others, strict=True))
        + max((a - b).abs().max().item() for a, b in zip(gradients, more, strict=True))
        for (losses, gradients), (others, more) in zip(one, other, strict=True)
    )


def fine_grained() -> Any:
    """How far steps are from those that offload nothing, and how many tensors went each way."""
    found = {}
    for name, make in MAKE.items():
        for how, options, modules in (
            ("all", {}, ["attn_norm", *INSIDE, "mlp_norm"]),
            ("with recomputed streams", models.SELECTIVE, INSIDE),
        ):
            build = partial(make, **models.MHC, **options)
            moved: list[int] = []
            with on_host(moved):
                offloads = {"fine_grained_activation_offloading": True, "offload_modules": modules}
                steps = stepped(build(**offloads, min_offloaded_tensor_size=0))
            found[f"{name}, {how}"] = [apart(steps, stepped(build())), len(moved)]
    return found


def layers() -> Any:
    """The same of Transformer Engine's offloading of whole layers, by hooks that copy."""
    moved: list[int] = []

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        moved.append(tensor.numel())
        return tensor.detach().clone()

    hooks = saved_tensors_hooks(copied, lambda tensor: tensor)
    vars(hooks)["inside_context"] = False  # which linear layers ask
    context = hooks, lambda hidden_states: hidden_states
    with mock.patch.object(transformer_block, "get_cpu_offload_context", lambda *given: context):
        steps = stepped(gpt(**models.MHC, cpu_offloading=True, cpu_offloading_num_layers=1))
    return [apart(steps, stepped(gpt(**models.MHC))), len(moved)]
