"""Megatron's own training loop over a small recipe, on CPU ranks that are forks of one process.

Imported in the process that runs a tree, after `te_stand_ins.before_ranks()`, never by pytest
itself. The model, its optimizer, the loop, its log, evaluation and checkpoints are the tree's.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core import optimizer as optimizers
from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.extensions import transformer_engine
from megatron.core.models.hybrid import hybrid_block
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import initialize_rerun_state_machine
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.timers import Timers
from megatron.core.transformer import transformer_block
from megatron.training import argument_utils, arguments, checkpointing, global_vars, training

from cppmega.recipe import Recipe
from cppmega.recipe.render import render
from cppmega.recipe.run_options import RunOptions
from cppmega.runs import metrics
from cppmega.training import pretrain, saving
from cppmega.training.batch import DataTokens, dataset_provider
from cppmega.training.evaluation import HeldOut
from cppmega.training.plan import TrainingPlan
from cppmega.training.step import ForwardStep
from tests.support import te_stand_ins

CPU = (
    *("--use-cpu-initialization", "--no-rope-fusion", "--no-persist-layer-norm"),
    *("--no-masked-softmax-fusion", "--no-bias-dropout-fusion", "--num-workers", "0"),
    "--dist-ckpt-optim-fully-reshardable",
)


DOCUMENTS, LONGEST = 4000, 100
"""Of the mock data, which is many times what a run reads. With Megatron's 100,000 of up to 4,096
tokens, every rank of every run would shuffle millions of samples, in few of which one ends."""


def _before_ranks() -> None:
    """Do once what every rank would do again."""
    MockGPTLowLevelDataset.size = DOCUMENTS
    MockGPTLowLevelDataset.max_sequence_length = LONGEST
    te_stand_ins.read_options_once()
    arguments.add_megatron_arguments(argparse.ArgumentParser())


_before_ranks()


def ready() -> None:
    """Called when the arguments are known, for what Megatron initializes then."""


class Loop:
    """A run on this rank."""

    def __init__(self, recipe: Recipe, options: RunOptions) -> None:
        logging.disable(logging.WARNING)
        # Final norms are those of the recipe, too.
        vars(hybrid_block)["TENorm"] = transformer_engine.TENorm
        vars(transformer_block)["LayerNormImpl"] = transformer_engine.TENorm
        recipe = recipe.plus(*CPU)
        tokens = DataTokens(recipe.vocab_size, recipe.vocab_size - 1, "mock")
        rendered = render(recipe, "0.19.2", options)
        self.plan = TrainingPlan(recipe, options, rendered, tokens, None, "d1g3st")  # type: ignore[arg-type]
        os.environ["WORLD_SIZE"] = str(torch.distributed.get_world_size())
        os.environ["RANK"] = str(torch.distributed.get_rank())
        os.environ.update(recipe.variables)
        self.args = self._arguments()
        ready()
        torch.manual_seed(1)
        make = getattr(argument_utils, f"{recipe.kind}_config_from_args")
        config = make(self.args)
        builder = config.get_builder_cls()(config)
        self.model = builder.build_model(ProcessGroupCollection.use_mpu_process_groups())
        self.config = self.model.config
        distributed = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            overlap_grad_reduce=recipe.overlap_grad_reduce,
            overlap_param_gather=recipe.overlap_param_gather,
        )
        self.ddp = DistributedDataParallel(self.config, distributed, self.model)
        options_ = optimizers.OptimizerConfig(
            optimizer="adam",
            lr=recipe.lr,
            min_lr=recipe.min_lr,
            clip_grad=1.0,
            use_distributed_optimizer=True,
        )
        self.optimizer = optimizers.get_megatron_optimizer(options_, [self.ddp])
        self.config.grad_scale_func = self.optimizer.scale_loss

    def _arguments(self) -> Any:
        sys.argv = ["train", *self.plan.rendered.argv]
        args = arguments.parse_args(pretrain._own_arguments(self.plan))
        with mock.patch.object(arguments, "get_device_arch_version", lambda: 10):
            arguments.validate_args(args)
        args.padded_vocab_size = self.plan.recipe.padded_vocab_size
        args.bf16, args.params_dtype = False, torch.float32
        args.iteration = args.num_floating_point_operations_so_far = 0
        global_vars._GLOBAL_ARGS = args
        global_vars._GLOBAL_TIMERS = Timers(0, "max")
        global_vars._GLOBAL_ENERGY_MONITOR = mock.MagicMock()
        global_vars._set_signal_handler(args.exit_signal)
        batches = (args.global_batch_size, args.micro_batch_size, args.data_parallel_size)
        init_num_microbatches_calculator(args.rank, None, *batches)
        initialize_rerun_state_machine()
        return args

    def train(self) -> None:
        """Hand over to Megatron's loop, with the hooks of the trainer."""
        plan, recipe = self.plan, self.plan.recipe
        step = ForwardStep(recipe, plan.data.eod, torch.device("cpu"), fresh=False)
        held_out = HeldOut(recipe, plan.data, plan.options.held_out, None)
        pretrain._install_hooks(training, checkpointing, plan, step, held_out, self.args)
        saves = pretrain._saves(plan)
        saving.install(training, checkpointing, saves)
        chunks = [self.ddp]
        scheduler = training.get_optimizer_param_scheduler(self.optimizer)
        get_cuda_rng_tracker().set_states({"model-parallel-rng": torch.get_rng_state()})
        if plan.options.load is not None:
            with _without_cuda():
                self.args.iteration, _ = checkpointing.load_checkpoint(
                    chunks, self.optimizer, scheduler
                )
        provide = dataset_provider(recipe, plan.data, plan.options.data, None, held_out.build)
        batches, _, _ = training.build_train_valid_test_data_iterators(provide)
        with _without_cuda():
            training.train(
                *(step, chunks, self.optimizer, scheduler, batches, None, None),
                *(self.config, {}, None),
            )
        if saves is not None:
            saves.wait()

    def digest(self) -> str:
        """Of all parameters and buffers of this rank, to the bit."""
        digest = hashlib.sha256()
        for _, tensor in sorted(self.model.state_dict().items()):
            if isinstance(tensor, torch.Tensor):
                digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy())
        return digest.hexdigest()[:16]


def _without_cuda() -> Any:
    """Let the loop ask the device for its memory, of which each rank has used a GiB more than the
    next one, and for its random state, which is the host's."""
    ranks: Any = torch.distributed
    return mock.patch.multiple(
        torch.cuda,
        max_memory_allocated=lambda: (ranks.get_world_size() - ranks.get_rank()) << 30,
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
    )


def losses(file: Path) -> dict[int, Any]:
    """Step -> everything that training logged of it, but not how fast it was."""
    return {row.step: (row.loss, row.grad_norm, row.losses) for row in metrics.steps(file)}


def held_out(file: Path) -> dict[int, dict[str, float]]:
    """Step -> the held-out losses after it."""
    return {row.evaluated: row.losses for row in metrics.evaluations(file)}
