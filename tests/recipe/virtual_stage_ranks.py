"""A hybrid model on two pipeline ranks with one and two stages each, against the model on one rank.

Imported in the process that runs a tree, never by pytest itself.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core import optimizer as optimizers
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)

from tests.configurations import models, training
from tests.configurations.settings import Configuration
from tests.upstream_patches import forked_ranks
from tests.upstream_patches.embeddings.input_embedding_ranks import Run as FedRun
from tests.upstream_patches.embeddings.input_embedding_ranks import with_them
from tests.upstream_patches.forked_ranks import on_ranks, without_dropout
from tests.upstream_patches.optimizer.distributed_optimizer import on_cpu

ALONE = Configuration(model="hybrid", mtp=2, optimizer="float32")
STAGES = {1: ["M*", "-*-"], 2: ["M", "*", "-", "*-"]}
"""By the number of stages of a rank."""
PASSES = 4
"""Micro-batches of a step."""


class Run(FedRun):
    """The stages of this rank in Megatron's own schedule, with every pass written down."""

    def __init__(self, setting: Configuration, each: int) -> None:
        self.setting, ranks = setting, setting.pipeline
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=ranks,
            virtual_pipeline_model_parallel_size=each if each > 1 else None,
        )
        torch.manual_seed(1)
        self.config = without_dropout(setting)
        if each > 1:
            self.config.virtual_pipeline_model_parallel_size = each
            self.config.overlap_p2p_comm, self.config.batch_p2p_comm = True, False
            self.config.microbatch_group_size_per_vp_stage = ranks
        self.models = [self._stage(number if each > 1 else None) for number in range(each)]
        ddp = DistributedDataParallelConfig()
        self.chunks = [DistributedDataParallel(self.config, ddp, one) for one in self.models]
        self.optimizer = optimizers.get_megatron_optimizer(
            optimizers.OptimizerConfig(
                optimizer="adam", lr=1e-3, params_dtype=torch.float32, clip_grad=1.0
            ),
            self.chunks,
        )
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.kept: Counter[int] = Counter()
        self.mixtures: list[dict[int, int]] = []

    def _stage(self, number: int | None) -> Any:
        given = {
            "config": self.config,
            "vocab_size": models.VOCABULARY,
            "max_sequence_length": training.LENGTH,
            "share_embeddings_and_output_weights": False,
            "vp_stage": number,
        }
        virtual = {"ignore_virtual": number is None, "vp_stage": number}
        given["pre_process"] = parallel_state.is_pipeline_first_stage(**virtual)
        given["post_process"] = parallel_state.is_pipeline_last_stage(**virtual)
        return models._hybrid(self.setting, given)

    def step(self, number: int) -> training.Row:
        """One step by the tree's own schedule."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        batches = [iter(self._batches(number)) for _ in self.chunks]
        losses = training.get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=batches if len(batches) > 1 else batches[0],
            model=self.chunks,
            num_microbatches=PASSES,
            seq_length=training.LENGTH,
            micro_batch_size=training.SAMPLES,
            forward_only=False,
        )
        done, norm, _ = self.optimizer.step()
        assert done, "the optimizer took no step"
        return {"losses": losses, "gradient": float(norm)}

    def _forward(self, batches: Any, model: Any) -> Any:
        out, loss = super()._forward(batches, model)
        stage = self.chunks.index(model)
        self.kept[stage] += 1
        self.mixtures.append(dict(+self.kept))
        out.register_hook(lambda gradient: self.kept.subtract([stage]))
        return out, loss

    def weights(self) -> list[Any]:
        """Of every stage, for a checkpoint."""
        return [one.sharded_state_dict() for one in self.models]

    def save(self, folder: Path) -> None:
        """All weights, under the names of any layout."""
        if torch.distributed.get_rank() == 0:
            folder.mkdir()
        torch.distributed.barrier()
        dist_checkpointing.save({f"model{n}": w for n, w in enumerate(self.weights())}, str(folder))

    def load(self, folder: Path) -> None:
        """Of this layout or another."""
        asked = {f"model{n}": w for n, w in enumerate(self.weights())}
        loaded = dist_checkpointing.load(asked, str(folder))
        for number, one in enumerate(self.models):
            one.load_state_dict(loaded[f"model{number}"])


def trained(
    setting: Configuration, each: int, begin: Path, end: Path, begins: bool
) -> dict[str, Any]:
    """Two steps from the weights in one folder, or from new ones; leaves those it ends with."""
    with on_cpu(), mock.patch.object(models, "LAYERS", STAGES[each]):
        with mock.patch.object(training, "MICRO_BATCHES", PASSES):
            run = Run(setting, each)
            (run.save if begins else run.load)(begin)
            rows = [run.step(number) for number in (1, 2)]
            run.save(end)
        parts = [sorted({n.partition(".")[0] for n, _ in m.named_parameters()}) for m in run.models]
        return {"rows": rows, "mixtures": run.mixtures, "parts": parts}


def ended(setting: Configuration, folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a folder in a model of one rank."""
    with on_cpu(), mock.patch.object(models, "LAYERS", STAGES[1]):
        run = Run(setting, 1)
        run.load(folder)
        return {name: p.detach().clone() for name, p in run.models[0].named_parameters()}


def compared(folder: Path) -> dict[str, Any]:
    """Losses and gradient norms of all layouts, weights that differ, and what was under way."""
    layout = replace(ALONE, pipeline=2)
    one, begun = folder / "one", folder / "begun"
    with with_them():
        (alone,) = on_ranks(folder, ALONE, trained, 1, begun, one, True)
        (wanted,) = on_ranks(folder, ALONE, ended, one)
        found: dict[str, Any] = {"alone": alone["rows"]}
        for each in STAGES:
            end = folder / f"ended{each}"
            ranks = on_ranks(folder, layout, trained, each, begun, end, False)
            (weights,) = on_ranks(folder, ALONE, ended, end)
            apart = [float((p - weights[name]).abs().max()) for name, p in wanted.items()]
            parts = {key: [rank[key] for rank in ranks] for key in ("rows", "mixtures", "parts")}
            found[str(each)] = {**parts, "apart": max(apart)}
    return found


report = partial(forked_ranks.report, {"compared": compared})
