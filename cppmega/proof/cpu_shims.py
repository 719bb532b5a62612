"""Shims that let megatron-core run without a GPU, for the smoke recipe, `verify` and the tests.

They have no effect if CUDA is available.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import queue
from collections.abc import Iterator
from typing import Any

from cppmega.proof import assigned


def shim() -> None:
    """Let megatron-core's CPU paths run: current device and stream, CUDA random state tracker.

    Has no effect if CUDA is available. May be called more than once.
    """
    import torch

    if torch.cuda.is_available():
        return
    # Megatron passes it as `device=`, which accepts a torch.device as well as an index.
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    # DDP requests the stream even if there is nothing to wait for, and dist_checkpointing
    # waits for the device before it copies.
    torch.cuda.current_stream = lambda device=None: None  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda device=None: None  # type: ignore[assignment]

    from megatron.core.tensor_parallel import random

    if importlib.util.find_spec("transformer_engine") is not None:
        # Even with a local spec, the norm after the last layer would be Transformer Engine's.
        from megatron.core.transformer import transformer_block
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        assigned.replace(transformer_block, "LayerNormImpl", WrappedTorchNorm)
    else:
        from megatron.core.transformer import multi_token_prediction

        # Main asks whether an MTP depth has layers of a class that is a mock without that package.
        if hasattr(multi_token_prediction, "is_inference_column_parallel_linear"):
            assigned.replace(
                multi_token_prediction, "is_inference_column_parallel_linear", lambda module: False
            )

    assigned.replace(random.CudaRNGStatesTracker, "fork", _no_fork)
    assigned.replace(random.CudaRNGStatesTracker, "add", _remember_seed)


def _remember_seed(self: Any, name: str, seed: int) -> None:
    self.states_.setdefault(name, seed)


@contextlib.contextmanager
def _no_fork(self: Any, name: str = "model-parallel-rng") -> Iterator[None]:
    """CPU initialization draws from the default generator, which the caller has seeded."""
    yield


def init_distributed(tensor: int = 1, context: int = 1, expert: int = 1) -> None:
    """Initialize gloo for the ranks of torchrun (or a single one), and Megatron's groups.

    Args:
        tensor: tensor-parallel size.
        context: context-parallel size.
        expert: expert-parallel size.
    """
    import torch
    from megatron.core import parallel_state

    shim()
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor,
            context_parallel_size=context,
            expert_model_parallel_size=expert,
        )


def keep_saves_here() -> None:
    """Let Megatron's saves give their results to a queue of this process.

    For its own queue, each rank would start a process, which imports torch and Megatron again. Only
    a save that continues in another process needs that, and no save of ours on CPU does.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()
