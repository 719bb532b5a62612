"""Hand a plan over to Megatron's `pretrain`, from megatron-core 0.17 on."""

from __future__ import annotations

import faulthandler
import functools
import inspect
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from msgspec import UNSET

from cppmega import calls, guard
from cppmega.catalogue import megatron_args
from cppmega.errors import CppmegaError
from cppmega.features.dsa import loss_schedule as dsa_loss_schedule
from cppmega.guard import imports
from cppmega.host.wording import counted
from cppmega.overlay import receipt
from cppmega.overlay import record as overlay_record
from cppmega.recipe.arithmetic import flops, megatron_flops, parameters
from cppmega.runs import metrics, rank_progress
from cppmega.training import nonfinite, parsing, requirements, saving
from cppmega.training.batch import dataset_provider
from cppmega.training.completeness import Completeness
from cppmega.training.evaluation import Evaluation, HeldOut
from cppmega.training.expert_load import ExpertLoad
from cppmega.training.garbage import Garbage
from cppmega.training.graph_pools import GraphPools
from cppmega.training.log import CUT, MOCK, Log, TrainingStart, to_megatrons_writers
from cppmega.training.model import model_config, model_provider
from cppmega.training.module_calls import ModuleCalls
from cppmega.training.plan import TrainingPlan
from cppmega.training.profiler import StepProfiler
from cppmega.training.step import ForwardStep
from cppmega.tree import accepted

_END = 120.0
"""Seconds that a rank has to end after its loop; then it prints where it waits, and waits on."""


def pretrain(plan: TrainingPlan) -> None:
    """Hand over to Megatron's training loop; returns when it has ended.

    Raises:
        CppmegaError: `no-gpu`, `argument-refused`, and the rules that are broken.
    """
    started = time.time()
    import torch

    _check_gpus(torch)
    sys.argv = [sys.argv[0], *plan.rendered.argv]
    import megatron.training
    from megatron.training import arguments, checkpointing, set_startup_timestamps, training

    args = parse(arguments, plan)
    requirements.check_arguments(plan.recipe, plan.options, args)
    _announce(plan)
    set_startup_timestamps(program_start=started, main_entry=time.time())

    from megatron.core.enums import ModelType

    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    step = ForwardStep(plan.recipe, plan.data.eod, device, fresh=plan.options.load is None)
    cache = str(plan.options.data_cache) if plan.options.data_cache is not None else None
    held_out = HeldOut(plan.recipe, plan.data, plan.options.held_out, cache)
    _install_hooks(training, checkpointing, plan, step, held_out, args)
    saves = _saves(plan)
    saving.install(training, checkpointing, saves)
    data = dataset_provider(plan.recipe, plan.data, plan.options.data, cache, held_out.build)
    try:
        _call(megatron.training.pretrain, arguments, plan, step, data, ModelType.encoder_or_decoder)
    finally:  # Megatron also ends its loop with SystemExit
        if saves is not None:
            saves.wait()
        faulthandler.dump_traceback_later(_END)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _call(
    megatron_pretrain: Any,
    arguments: Any,
    plan: TrainingPlan,
    step: ForwardStep,
    data: Any,
    kind: Any,
) -> None:
    """Call `pretrain` as the installed release declares it."""
    own = _own_arguments(plan)
    if "cfg_container" not in inspect.signature(megatron_pretrain).parameters:  # 0.17
        megatron_pretrain(data, model_provider(plan.recipe), kind, step, extra_args_provider=own)
        return
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    args = arguments.parse_and_validate_args(extra_args_provider=own)
    model = model_config(plan.recipe, args)
    container = pretrain_cfg_container_from_args(args, model)
    if model is None:  # 0.18
        megatron_pretrain(container, data, model_provider(plan.recipe), kind, step)
    else:
        megatron_pretrain(container, data, kind, step)


def parse(arguments: Any, plan: TrainingPlan) -> Any:
    """Parse the arguments with Megatron's parser.

    Raises:
        CppmegaError: `argument-refused`.
    """
    args, reason = parsing.parsed(
        lambda: arguments.parse_args(extra_args_provider=_own_arguments(plan))
    )
    if reason:
        raise CppmegaError(
            "argument-refused",
            f"megatron-core {plan.rendered.version} refuses the arguments: {reason}",
            "It has no such argument or value.",
            "correct the words after --, or what the recipe adds with plus()",
        )
    return args


def _own_arguments(plan: TrainingPlan) -> Any:
    """Add recipe, overlay and data to Megatron's arguments, so that every checkpoint has them."""

    def provide(parser: Any) -> Any:
        group = parser.add_argument_group("cppmega")
        group.add_argument("--cppmega-recipe", default=plan.recipe.name)
        group.add_argument("--cppmega-overlay", default=plan.overlay)
        group.add_argument("--cppmega-patches", default=overlay_record.dump(_record(plan)))
        group.add_argument("--cppmega-data", default=plan.data.fingerprint)
        return parser

    return provide


def _check_gpus(torch: Any) -> None:
    wanted = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if usable < wanted:
        raise CppmegaError(
            "no-gpu",
            f"The launch has {counted(wanted, 'process', 'processes')} on this host, which has "
            f"{counted(usable, 'usable GPU')}.",
            "Megatron's training loop and optimizer require CUDA.",
            "nvidia-smi; cppmega recipes lists the recipes that run on CPU",
        )


def _install_hooks(
    training: Any,
    checkpointing: Any,
    plan: TrainingPlan,
    step: ForwardStep,
    held_out: HeldOut,
    args: Any,
) -> None:
    """Wrap Megatron's logging, train_step and checkpoint-argument check, and replace evaluation.

    Megatron looks these functions up in their modules at each call.
    """
    import torch

    def last_rank() -> bool:
        return bool(torch.distributed.get_rank() == torch.distributed.get_world_size() - 1)

    profiler, experts = _profiler(plan), ExpertLoad()
    graphs = megatron_args.cuda_graphs(args)
    log = Log(
        plan.recipe,
        int(os.environ.get("WORLD_SIZE", "1")),
        mock=plan.options.mock_data,
        squares=step.taken_squares,
        peak=lambda: most_of_all_ranks(torch.cuda.max_memory_allocated() / 2**30),
        graph_pools=GraphPools(graphs, torch.cuda.memory_snapshot).gib,
        expert_load=experts.load,
        metrics=plan.options.metrics,
        profiled=profiler.took_disturbed,
        scalars=to_megatrons_writers,
    )
    replaced = log.around(training.print_rank_last, last_rank)
    imports.replace(training, "print_rank_last", replaced)
    finalize = experts.around(training.finalize_model_grads)
    imports.replace(training, "finalize_model_grads", finalize)
    complete, marks = Completeness(plan.recipe), rank_progress.of_this_rank()
    # Graphs refuse modules with hooks.
    calls = ModuleCalls(bool(args.overlap_param_gather) and graphs == "none")
    garbage = Garbage()

    def begin(models: list[Any]) -> None:
        marks.begin_step()
        complete.before_step(models)
        calls.before_step(models)

    def ended() -> None:
        complete.after_step()
        calls.after_step()
        garbage.after_step()

    named = nonfinite.around_train_step(training.train_step, begin, ended)
    imports.replace(training, "train_step", profiler.around(named))
    mock, metrics_file = plan.options.mock_data, plan.options.metrics
    evaluation = Evaluation(step, held_out, mock=mock, metrics=metrics_file, writes=last_rank)
    imports.replace(training, "evaluate_and_print_results", evaluation.evaluate)
    # In every release, Megatron passes it the arguments of the run that wrote the checkpoint.
    check = comparing_overlays(checkpointing.check_checkpoint_args, _record(plan))
    imports.replace(checkpointing, "check_checkpoint_args", check)


def most_of_all_ranks(value: float) -> float:
    """The largest of the ranks' values; every rank must call it.

    The rank that logs is in the last pipeline stage, which rarely needs the most memory.
    """
    import torch

    largest = torch.tensor(value, device="cuda", dtype=torch.float64)
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
    return float(largest)


def _saves(plan: TrainingPlan) -> saving.Saves | None:
    """The record of the saves, on the rank that writes the tracker."""
    folder = plan.options.save
    if folder is None or int(os.environ.get("RANK", "0")):
        return None
    return saving.Saves(folder, plan.recipe.keep_checkpoints, functools.partial(print, flush=True))


def _profiler(plan: TrainingPlan) -> StepProfiler:
    done, _ = requirements.Start(plan.recipe, plan.options).steps
    return StepProfiler(
        plan.options,
        done + 1,
        rank=int(os.environ.get("RANK", "0")),
        recipe=plan.recipe.name,
        overlay=plan.overlay,
        megatron=plan.rendered.version,
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
    )


def comparing_overlays(
    check: Callable[..., None], now: overlay_record.OverlayRecord
) -> Callable[..., None]:
    """Wrap Megatron's check of a checkpoint's arguments: also print how its overlay differs.

    So does the step at which the loss of the DSA indexer changes.
    """

    def compared(saved: Any, **options: Any) -> None:
        then = overlay_record.parse(getattr(saved, "cppmega_patches", ""))
        lines = (
            overlay_record.remark_on_checkpoint(then, now),
            dsa_loss_schedule.remark_on_checkpoint(saved),
        )
        if int(os.environ.get("RANK", "0")) == 0:
            for line in filter(None, lines):
                print(line, flush=True)
        check(saved, **options)

    return compared


def _record(plan: TrainingPlan) -> overlay_record.OverlayRecord:
    """The record of the code that writes a checkpoint."""
    active = guard.active()
    if active is not None:
        return overlay_record.record_of(active.receipt, accepted.in_this_process(), calls.allowed())
    if plan.session is None:
        return overlay_record.OverlayRecord(digest=plan.overlay)
    return overlay_record.record_of(
        receipt.load(plan.session.read_tree()).receipt,
        accepted.in_this_process(),
        calls.allowed(),
    )


def _announce(plan: TrainingPlan) -> None:
    """Print what is about to be trained, and write it to the metrics."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    recipe, count = plan.recipe, parameters(plan.recipe)
    data = MOCK if plan.options.mock_data else f"data {plan.data.fingerprint}"
    cut = f"{CUT}: {recipe.cut}, " if recipe.cut else ""
    if rank == 0:
        print(
            f"cppmega: recipe {recipe.name}, {cut}{recipe.precision}, megatron-core "
            f"{plan.rendered.version}, overlay {plan.overlay}, {data}, "
            f"{count.total / 1e9:.3f} B parameters ({count.mtp / 1e9:.3f} B of MTP), "
            f"{flops(recipe) / 1e9:.2f} GFLOP per token (Megatron counts "
            f"{megatron_flops(recipe) / 1e9:.2f})",
            flush=True,
        )
    if rank == world - 1 and plan.options.metrics is not None:
        metrics.append(
            plan.options.metrics,
            TrainingStart(
                start=recipe.name,
                megatron=plan.rendered.version,
                overlay=plan.overlay,
                data=plan.data.fingerprint,
                held_out=plan.data.held_out,
                mock_data=plan.options.mock_data,
                parameters=count.total,
                load=str(plan.options.load) if plan.options.load else None,
                train_iters=recipe.train_iters,
                arguments=plan.rendered.argv,
                dsa_dense_loss_steps=dsa_loss_schedule.stated_steps() or UNSET,
            ),
        )
