"""Saves and loads a DSA indexer by Megatron's own checkpoints, and prints its scores as JSON.

Imported in the process that runs a tree, never by pytest itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.module import MegatronModule
from megatron.training import checkpointing, global_vars

from cppmega.errors import CppmegaError
from cppmega.proof import cpu_shims, small_models
from tests.support import parsed_line
from tests.upstream_patches.optimizer.distributed_optimizer import cuda_is_cpu

WITHOUT = ("--save-interval", "1", "--no-save-rng", "--no-load-rng", "--no-save-optim")
SIZES = ("--qk-pos-emb-head-dim", "8")


class Model(MegatronModule):  # type: ignore[misc]
    """One indexer, where a layer has it."""

    def __init__(self, seed: int) -> None:
        indexer = small_models.dsa_indexer(params_dtype=torch.float32, bf16=False)
        super().__init__(indexer.config)
        self.attention = torch.nn.Module()
        self.attention.indexer = indexer
        drawn = torch.Generator().manual_seed(seed)
        for parameter in indexer.parameters():
            torch.nn.init.normal_(parameter, generator=drawn)


def run(*jobs: dict[str, Any]) -> None:
    """Print what each job returns."""
    cpu_shims.init_distributed()
    dsa.rotate_activation = lambda x: x  # a rotation of both sides: no scores change
    found = []
    for at, job in enumerate(jobs):
        with mock.patch.dict(os.environ, job.pop("env", {})):
            found.append(_scores(number=at + 1, **job))
    print(json.dumps(found))


def _scores(
    folder: str, number: int, line: list[str], save: bool = False, load: bool = True
) -> Any:
    """Load and save; return the scores of the model, or the error with which it is not loaded."""
    args = parsed_line.validated("--save", folder, "--load", folder, *WITHOUT, *SIZES, *line)
    args.dsa_indexer_head_dim = 32
    global_vars._GLOBAL_ARGS = args
    global_vars._GLOBAL_TIMERS = mock.MagicMock()
    model = Model(number)
    try:
        with _without_gpu():
            if load:
                checkpointing.load_checkpoint([model], None, None)
            if save:
                checkpointing.save_checkpoint(number, [model], None, None, 0)
        torch.manual_seed(1)
        x, compressed = torch.randn(8, 2, 64), torch.randn(8, 2, 32)
        return model.attention.indexer.forward_with_scores(x, compressed)[0].double().tolist()
    except CppmegaError as error:
        return error.name


@contextlib.contextmanager
def _without_gpu() -> Iterator[None]:
    tracker = checkpointing.tensor_parallel.get_cuda_rng_tracker()
    with (
        cuda_is_cpu(),
        mock.patch.object(filesystem_async, "_results_queue", queue.Queue()),
        mock.patch.object(checkpointing, "update_num_microbatches"),
        mock.patch.object(torch.cuda, "current_device", lambda: "cpu"),
        mock.patch.object(torch.cuda, "get_rng_state", torch.get_rng_state),
        mock.patch.object(tracker, "get_states", dict),
    ):
        yield
