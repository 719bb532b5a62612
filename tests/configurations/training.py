"""One configuration on this rank: train, save, load, train on; and what came of it.

Imported in the process that runs a tree, never by pytest itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core import optimizer as optimizers
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func

from tests.configurations import models
from tests.configurations.batches import LENGTH, SAMPLES, Batch, micro_batch
from tests.configurations.late import arrive_late
from tests.configurations.settings import Configuration
from tests.upstream_patches.optimizer.distributed_optimizer import on_cpu

STEPS = 2
"""Before the checkpoint; one more follows it."""
MICRO_BATCHES = 2

Row = dict[str, Any]


def train(setting: Configuration, folder: Path) -> Iterator[tuple[str, Row]]:
    """Train and save, then the next step twice: with the same model, and with a loaded one."""
    with on_cpu():
        run = Run(setting, seed=1)
        for model in run.stages:
            arrive_late(model)
        yield "step 1", run.step(1)
        if setting.evaluation:
            yield "evaluation", run.evaluate(1)
        for number in range(2, STEPS + 1):
            yield f"step {number}", run.step(number)
        run.save(folder)
        yield "continued", run.step(STEPS + 1)
    yield from resume(setting, folder)


def resume(setting: Configuration, folder: Path) -> Iterator[tuple[str, Row]]:
    """The step after a checkpoint, which the other tree may have saved."""
    with on_cpu():
        run = Run(setting, seed=7)
        run.load(folder)
        yield "resumed", run.step(STEPS + 1)


class Run:
    """A model with its optimizer."""

    def __init__(self, setting: Configuration, seed: int) -> None:
        self.setting = setting
        self.config, self.stages = models.build_stages(setting, seed)
        self.model = self.stages[0]
        options = DistributedDataParallelConfig(
            use_distributed_optimizer=setting.distributed,
            overlap_grad_reduce=setting.overlap != "none",
            overlap_param_gather=setting.overlap == "both",
            bucket_size=None if setting.overlap == "none" else 2000,
        )
        self.ddps = [
            DistributedDataParallel(self.config, options, stage, disable_bucketing=number > 0)
            for number, stage in enumerate(self.stages)
        ]
        self.ddp = self.ddps[0]
        self.optimizer = optimizers.get_megatron_optimizer(
            optimizers.OptimizerConfig(
                optimizer="adam",
                lr=1e-3,  # Adam moves everything by about this much, whatever the gradient
                bf16=self.config.bf16,
                fp16=self.config.fp16,
                initial_loss_scale=2.0**10,
                hysteresis=1,
                params_dtype=self.config.params_dtype,
                use_distributed_optimizer=setting.distributed,
                overlap_param_gather=setting.overlap == "both",
                clip_grad=setting.clip,
            ),
            self.ddps,
        )
        self._gathers_late = False
        if setting.overlap == "both":  # Megatron's loop gathers late from the second step on
            for ddp in self.ddps:
                ddp.disable_forward_pre_hook(param_sync=False)
        if setting.overlap != "none":
            skipped = [ddp.no_sync for ddp in self.ddps]
            self.config.no_sync_func = skipped if len(skipped) > 1 else skipped[0]
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss

    def step(self, number: int) -> Row:
        """One training step by the tree's own schedule; this rank's part of the losses."""
        torch.manual_seed(100 * number + parallel_state.get_data_parallel_rank())
        for ddp in self.ddps:
            ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        batches = self._batches(number)
        losses = self._run(batches)
        done, norm, _ = self.optimizer.step()
        assert done != batches[0].overflows, "the optimizer took no step, or one that overflows"
        if self.setting.overlap == "both" and not self._gathers_late:
            self._gather_late(True)
        return {
            "losses": losses,
            "gradient": float(norm or 0.0),
            "weights": "" if self._gathers_late else self._digest(),
        }

    def evaluate(self, number: int) -> Row:
        """The losses of a step's data, and the parameters."""
        was_late = self._gathers_late
        self._gather_late(False)
        for ddp in self.ddps:
            ddp.eval()
        with torch.no_grad():
            losses = self._run(self._batches(number), forward_only=True)
        for ddp in self.ddps:
            ddp.train()
        row = {"losses": losses, "gradient": 0.0, "weights": self._digest()}
        self._gather_late(was_late)
        return row

    def _gather_late(self, late: bool) -> None:
        """Let parameters be gathered in the forward pass, or gather them now and before it."""
        if late == self._gathers_late:
            return
        for ddp in self.ddps:
            ddp.enable_forward_pre_hook() if late else ddp.disable_forward_pre_hook()
        self._gathers_late = late

    def _run(self, batches: list[Batch], forward_only: bool = False) -> list[float]:
        losses: list[float] = get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=[iter(batches) for _ in self.ddps],
            model=self.ddps,
            num_microbatches=MICRO_BATCHES,
            seq_length=LENGTH,
            micro_batch_size=SAMPLES if self.setting.packing == "none" else 1,
            forward_only=forward_only,
        )
        return losses if parallel_state.get_tensor_model_parallel_rank() == 0 else []

    def _batches(self, step: int) -> list[Batch]:
        replica = parallel_state.get_data_parallel_rank()
        group = parallel_state.get_context_parallel_group()
        return [
            micro_batch(self.setting, step, number, replica, group.rank(), group)
            for number in range(MICRO_BATCHES)
        ]

    def _forward(self, batches: Any, model: Any) -> Any:
        batch: Batch = next(batches)
        extra = {} if self.setting.mtp == 0 else {"loss_mask": batch.loss_mask}
        if self.setting.padding_mask:
            extra["padding_mask"] = batch.padding
        out = model(
            batch.tokens,
            batch.positions,
            None,
            labels=batch.labels,
            packed_seq_params=batch.pack,
            **extra,
        )
        return out, partial(_loss, batch)

    def _digest(self) -> str:
        """Of all parameters of this rank, to the bit."""
        digest = hashlib.sha256()
        for stage in self.stages:
            for _, parameter in sorted(stage.named_parameters()):
                digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    def save(self, folder: Path) -> None:
        """A checkpoint in Megatron's format."""
        late = self._gathers_late
        self._gather_late(False)
        dist_checkpointing.save(self._state(is_loading=False), str(folder))
        self._gather_late(late)

    def load(self, folder: Path) -> None:
        """Of this tree or another."""
        loaded = dist_checkpointing.load(self._state(is_loading=True), str(folder))
        for name, stage in self._named_stages():
            stage.load_state_dict(loaded[name])
        self.optimizer.load_state_dict(loaded["optimizer"])

    def _state(self, is_loading: bool) -> dict[str, Any]:
        format_ = "dp_reshardable" if self.setting.optimizer == "dp_reshardable" else ""
        metadata = {
            "distrib_optim_sharding_type": format_ or "fully_reshardable",
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        model = {
            name: stage.sharded_state_dict(metadata=metadata)
            for name, stage in self._named_stages()
        }
        whole = model if len(model) > 1 else model["model"]
        optimizer = self.optimizer.sharded_state_dict(whole, is_loading, metadata=metadata)
        return {**model, "optimizer": optimizer}

    def _named_stages(self) -> list[tuple[str, torch.nn.Module]]:
        """Each stage by its name in Megatron's checkpoints."""
        if len(self.stages) == 1:
            return [("model", self.model)]
        return [(f"model{number}", stage) for number, stage in enumerate(self.stages)]


def _loss(batch: Batch, per_token: torch.Tensor) -> tuple[torch.Tensor, float]:
    total = (per_token.float() * batch.loss_mask).sum()
    return total / LENGTH * (torch.inf if batch.overflows else 1.0), float(total.detach())
