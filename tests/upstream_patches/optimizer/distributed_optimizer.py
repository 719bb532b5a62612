"""A small model under Megatron's DDP and distributed optimizer, on the CPU, of any version.

Imported in the process that runs a tree, never by pytest itself.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from megatron.core import optimizer as optimizers
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import distrib_optimizer
from megatron.core.transformer import TransformerConfig

WIDTHS = (5, 7, 9, 11, 3)
_MAKERS = (
    *("arange", "as_tensor", "empty", "empty_like", "full", "full_like", "ones", "ones_like"),
    *("rand", "randint", "randn", "tensor", "zeros", "zeros_like"),
)
_METHODS = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "to")
_TYPE = torch.Tensor.type


@contextlib.contextmanager
def cuda_is_cpu() -> Iterator[None]:
    """Let the optimizers, which name CUDA and its tensor types, run on the CPU.

    Only the functions that may be given a device are replaced: under a `TorchFunctionMode`, every
    operation and attribute of a model would be slower.
    """
    with (
        mock.patch.multiple(torch, **{name: _here(getattr(torch, name)) for name in _MAKERS}),
        mock.patch.multiple(
            torch.Tensor,
            **{name: _here(getattr(torch.Tensor, name)) for name in _METHODS},
            cuda=lambda tensor, *_, **__: tensor,
            type=_type,
        ),
    ):
        yield


def _here(function: Any) -> Any:
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            kwargs.pop("pin_memory", None)
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
        return function(*args, **kwargs)

    return called


def _type(tensor: torch.Tensor, *given: Any, **named: Any) -> Any:
    result = _TYPE(tensor, *given, **named)
    return result if given or named else f"torch.cuda.{result[6:]}"


class Adam(torch.optim.Optimizer):
    """Adam that counts its steps per group, as the distributed optimizer expects of FusedAdam."""

    def __init__(self, params: Any, lr: float, betas: Any = (0.9, 0.95), **ignored: Any) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                for key in ("exp_avg", "exp_avg_sq"):
                    self.state[p].setdefault(key, torch.zeros_like(p))
                mean, square = self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"]
                mean.lerp_(p.grad, 1 - group["betas"][0])
                square.lerp_(p.grad.square(), 1 - group["betas"][1])
                p -= group["lr"] / group["step"] * mean / (square.sqrt() + 1e-8)


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Let these optimizers run without a GPU, with `Adam` instead of FusedAdam."""
    with (
        cuda_is_cpu(),
        mock.patch.multiple(optimizers, Adam=Adam, USING_PYTORCH_OPTIMIZER=False),
        mock.patch.multiple(distrib_optimizer, Adam=Adam, HAVE_APEX_OR_TE=True),
    ):
        yield


class Run:
    """A bf16 model and its optimizer, with one bucket or several of about this many parameters."""

    def __init__(
        self, seed: int, lr: float, distributed: bool = True, buckets: int | None = None
    ) -> None:
        torch.manual_seed(seed)
        layers = [torch.nn.Linear(*pair) for pair in pairwise(WIDTHS)]
        self.model = torch.nn.Sequential(*layers).bfloat16()
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, bf16=True)
        self.ddp = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                use_distributed_optimizer=distributed,
                overlap_grad_reduce=buckets is not None,
                bucket_size=buckets,
            ),
            self.model,
        )
        options = optimizers.OptimizerConfig(
            optimizer="adam",
            lr=lr,
            min_lr=lr / 100,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=distributed,
        )
        self.optimizer = optimizers.get_megatron_optimizer(options, [self.ddp])

    @property
    def inner(self) -> Any:
        """Return the only optimizer of the chain."""
        (inner,) = self.optimizer.chained_optimizers
        return inner

    def step(self, seed: int) -> None:
        """Run a step on data drawn from `seed`."""
        torch.manual_seed(seed)
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.ddp(torch.randn(4, WIDTHS[0]).bfloat16()).float().square().mean().backward()
        self.ddp.finish_grad_sync()
        assert self.optimizer.step()[0]

    def sharded(self) -> dict[str, Any]:
        """Return the model's sharded state dict."""
        return {
            name: ShardedTensor.from_rank_offsets(name, p, replica_id=(0, 0, 0))
            for name, p in self.model.named_parameters()
        }

    def states(self) -> dict[str, dict[str, Any]]:
        """Return fp32 copy and moments of each parameter, as the optimizer maps them."""
        return {
            name: {
                key: value.detach().view(p.shape)
                for key, value in self.inner._get_main_param_and_optimizer_states(p).items()
            }
            for name, p in self.model.named_parameters()
        }


def assert_equal(a: Run, b: Run) -> None:
    """Assert that parameters and states of two runs are the same."""
    pairs = zip(a.model.parameters(), b.model.parameters(), strict=True)
    assert all(one.equal(other) for one, other in pairs)
    states = b.states()
    for name, mine in a.states().items():
        assert all(value.equal(states[name][key]) for key, value in mine.items()), name
