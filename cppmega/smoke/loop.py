"""The training loop of recipes that run on CPU: any number of gloo ranks, checkpoints, SIGTERM.

To a launcher it behaves like Megatron's own: the same checkpoint names, the same
`--save-interval` and `--exit-interval`, and SIGTERM to one rank makes all ranks save and end.
"""

from __future__ import annotations

import math
import signal
import time
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from cppmega import calls, guard
from cppmega.errors import CppmegaError
from cppmega.host import env
from cppmega.host.wording import counted
from cppmega.overlay import record as overlay_record
from cppmega.recipe import Recipe
from cppmega.recipe.run_options import RunOptions
from cppmega.runs import metrics, rank_progress
from cppmega.runs.metrics import LoggedStep, Start
from cppmega.runs.spikes import Spikes
from cppmega.smoke import checkpoint as smoke_checkpoint
from cppmega.smoke.point import CurvePoint
from cppmega.training.nonfinite import Watch
from cppmega.training.profiler import StepProfiler
from cppmega.tree import accepted


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """The settings of one start, as opposed to those of the recipe."""

    data: Path
    """Folder of the indexed dataset; built there if it is missing."""
    steps: int
    save: Path | None = None
    load: Path | None = None
    save_interval: int = 0
    """Steps between checkpoints; 0: only the last one."""
    exit_interval: int | None = None
    log_interval: int = 20
    metrics: Path | None = None
    unguarded: bool = False
    """Train without the guard where cppmega.run has not started the process, as on stock."""
    options: RunOptions = field(default_factory=RunOptions)
    """Options of the command line, for the profile."""


@dataclass(slots=True)
class Outcome:
    """The result of a training."""

    first: int
    """Steps of the loaded checkpoint."""
    curve: list[CurvePoint]
    """One point for each step."""
    compile_helpers: str
    """How Megatron's start-up helper ended the process; empty: it did not."""


class _Stop:
    """A SIGTERM that any rank received, known to all of them after the step."""

    def __init__(self) -> None:
        self._received = False
        signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, number: int, frame: Any) -> None:
        self._received = True

    def wanted(self) -> bool:
        """Whether any rank was asked to end."""
        import torch

        flag = torch.tensor([float(self._received)])
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
        return bool(flag.item())


def run(recipe: Recipe, loop: Loop) -> Outcome:
    """Train; returns at the last step, at the exit interval, or after SIGTERM with a checkpoint.

    Raises:
        CppmegaError: `wrong-world-size`, `first-loss-implausible`, `step-not-finite`,
            `already-trained`.
    """
    import torch

    from cppmega.proof import cpu_shims
    from cppmega.smoke import model as smoke_model
    from cppmega.smoke import packs as smoke_packs
    from cppmega.smoke.training_step import over_ranks, train_step

    stop = _Stop()
    torch.set_num_threads(1)  # the matrices are too small to share
    torch.manual_seed(recipe.seed)
    cpu_shims.init_distributed()
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    plan = recipe_of_rank(recipe, world)
    outcome = Outcome(0, [], _compile_helpers())
    if rank == 0:
        smoke_packs.build(loop.data)
    torch.distributed.barrier()
    model, ddp, optimizer = smoke_model.with_optimizer(plan)
    watch = Watch()
    if loop.load is not None:
        outcome.first = smoke_checkpoint.load(loop.load, model, optimizer, _record())
    _announce(recipe, loop, outcome.first, rank, world)
    if outcome.first >= loop.steps:
        raise CppmegaError(
            "already-trained",
            f"The checkpoint has {outcome.first} steps, and {loop.steps} are requested.",
            "There is nothing left to train.",
            f"--set train_iters={outcome.first + loop.steps} resumes the training",
        )
    # Every rank reads the same documents and takes its own batches of them.
    batches = smoke_packs.packs(loop.data / "train", plan, recipe.seed)
    mine = islice(batches, outcome.first * world + rank, None, world)
    others = {"async_save": False, "use_layer_wise_distributed_optimizer": False}
    args = (model.config, ddp.ddp_config, others)
    marks, spikes = rank_progress.of_this_rank(), Spikes()
    started, saved, step = time.monotonic(), outcome.first, outcome.first
    profiler = StepProfiler(
        loop.options,
        outcome.first + 1,
        rank=rank,
        on_gpu=False,
        recipe=recipe.name,
        overlay=_record().digest,
        world_size=world,
    )
    numbers = range(outcome.first + 1, loop.steps + 1)
    for step in guard.steps(numbers, *args, unguarded=loop.unguarded):
        step_start = time.monotonic()
        marks.begin_step()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(plan, step)
        batch = next(mine)
        marks.read_batch()
        with profiler.step():
            point = train_step(plan, step, model, ddp, optimizer, batch, watch)
        point = over_ranks(point, world)
        if step == 1:
            _check_first_loss(point.loss, plan)
        outcome.curve.append(point)
        tokens = recipe.global_batch_size * recipe.seq_length
        profiled = profiler.took_disturbed()
        _log(loop, point, tokens, step_start, started, outcome.first, rank, profiled)
        _mark_spike(point, spikes, rank)
        ended = stop.wanted()
        if loop.save and (ended or (loop.save_interval and step % loop.save_interval == 0)):
            smoke_checkpoint.save(loop.save, model, optimizer, step, _record())
            saved = step
            guard.after_first_save()
        if ended or (loop.exit_interval and step % loop.exit_interval == 0):
            if rank == 0 and ended:
                print(f"cppmega: ending at step {step} after receiving SIGTERM", flush=True)
            break
    guard.after_first_step()  # a run that was ended in its first step has left the loop early
    if loop.save and saved != step:
        smoke_checkpoint.save(loop.save, model, optimizer, step, _record())
        guard.after_first_save()
    return outcome


def learning_rate(plan: Recipe, step: int) -> float:
    """The rate of a step: it rises linearly over the warm-up, if there is one, and then stays."""
    return plan.lr * min(1.0, step / max(plan.lr_warmup_iters, 1))


def recipe_of_rank(recipe: Recipe, world: int) -> Recipe:
    """The recipe with one rank's share of the global batch, which is the same for any world size.

    Raises:
        CppmegaError: `wrong-world-size`.
    """
    share, rest = divmod(recipe.global_batch_size, world)
    if rest or not share:
        raise CppmegaError(
            "wrong-world-size",
            f"A global batch of {recipe.global_batch_size} cannot be divided among {world} ranks.",
            "Another batch size would be another run.",
            f"--nproc with a divisor of {recipe.global_batch_size}",
        )
    return recipe.with_(micro_batch_size=share, global_batch_size=share)


def _record() -> overlay_record.OverlayRecord:
    guarded = guard.active()
    if guarded is None:
        return overlay_record.OverlayRecord(digest=overlay_record.NONE)
    return overlay_record.record_of(guarded.receipt, accepted.in_this_process(), calls.allowed())


def _announce(recipe: Recipe, loop: Loop, first: int, rank: int, world: int) -> None:
    """Print what is about to be trained, and append it to the metrics."""
    from cppmega.smoke import corpus

    if rank != 0:
        return
    digest, data = _record().digest, corpus.fingerprint(loop.data)
    print(
        f"cppmega: recipe {recipe.name}, {recipe.precision}, {counted(world, 'rank')} on CPU, "
        f"overlay {digest}, data {data}, "
        + (f"resuming at step {first + 1}" if first else "from scratch"),
        flush=True,
    )
    if loop.metrics is not None:
        load = str(loop.load) if loop.load else None
        start = Start(
            start=recipe.name, overlay=digest, data=data, load=load, train_iters=loop.steps
        )
        metrics.append(loop.metrics, start)


def _compile_helpers() -> str:
    """Make the first call of Megatron's trainer; stock exits here, which is recorded."""
    from megatron.core.datasets.utils import compile_helpers

    try:
        compile_helpers()
    except SystemExit as error:
        print(f"stock: compile_helpers exited with status {error.code}; a real run would end here")
        return f"exit {error.code}"
    return ""


def _check_first_loss(loss: float, plan: Recipe) -> None:
    expected = math.log(plan.vocab_size)
    if abs(loss - expected) > 1:
        raise CppmegaError(
            "first-loss-implausible",
            f"The first loss is {loss:.2f}; a fresh model has ln V = {expected:.2f}.",
            "The initialization, the data or a patch is wrong: such a run's numbers mean nothing.",
            "inspect what changed last",
        )


def _log(
    loop: Loop,
    point: CurvePoint,
    tokens: int,
    step_start: float,
    started: float,
    first: int,
    rank: int,
    profiled: bool,
) -> None:
    if rank != 0:
        return
    now = time.monotonic()
    if point.step % loop.log_interval == 0 or point.step == loop.steps:
        mtp = math.nan if point.mtp is None else point.mtp
        progress = f"step {point.step}/{loop.steps}  loss {point.loss:.3f}  mtp {mtp:.3f}"
        speed = (point.step - first) / (now - started)
        print(f"{progress}  wrong MTP labels {point.wrong}  {speed:.1f} steps/s", flush=True)
    if loop.metrics is not None:
        metrics.append(
            loop.metrics,
            LoggedStep(
                step=point.step,
                seconds=now - step_start,
                tokens_per_second=tokens / (now - step_start),
                loss=point.loss,
                grad_norm=point.grad_norm,
                losses={"lm loss": point.loss}
                | ({} if point.mtp is None else {"mtp loss": point.mtp}),
                profiled=profiled,
            ),
        )


def _mark_spike(point: CurvePoint, spikes: Spikes, rank: int) -> None:
    spike = spikes.remark(point.loss, point.grad_norm)
    if spike and rank == 0:
        print(f"cppmega: SPIKE at step {point.step}: {spike}", flush=True)


def train(recipe: Recipe, options: RunOptions) -> None:
    """Train a loop recipe with the options of the trainer's command line.

    Raises:
        CppmegaError: `not-supported`, and what `run` raises.
    """
    refuse_options(recipe, options)
    loop = Loop(
        data=folder_of(options.data, recipe),
        steps=recipe.train_iters,
        save=options.save,
        load=options.load,
        save_interval=options.save_interval,
        exit_interval=options.exit_interval,
        log_interval=options.log_interval,
        metrics=options.metrics,
        options=options,
    )
    run(recipe, loop)


def refuse_options(recipe: Recipe, options: RunOptions) -> None:
    """Refuse every option that the loop would ignore.

    Raises:
        CppmegaError: `not-supported`.
    """
    unsupported = {
        "held-out": options.held_out,
        "mock-data": options.mock_data,
        "data-cache": options.data_cache,
        "tensorboard": options.tensorboard,
        "wandb-project": options.wandb_project,
        "wandb-name": options.wandb_name,
        "tokenizer": options.tokenizer,
        "eod": options.eod,
    }
    wrong = [f"--{name}" for name, value in unsupported.items() if value]
    wrong += [" ".join(recipe.arguments)] if recipe.arguments else []
    if wrong:
        raise CppmegaError(
            "not-supported",
            f"The CPU loop of recipe {recipe.name} does not support {', '.join(wrong)}.",
            "The option would be ignored silently.",
            "leave it out",
        )


def folder_of(data: tuple[str, ...], recipe: Recipe) -> Path:
    """The folder of the loop's dataset, which it builds from the corpus that ships with it.

    Raises:
        CppmegaError: `not-supported`.
    """
    if len(data) > 1:
        raise CppmegaError(
            "not-supported",
            f"Recipe {recipe.name} takes one folder of data, not {len(data)}.",
            "It builds its own dataset there and cannot mix several.",
            "name one folder, or none",
        )
    return Path(data[0]) if data else env.RUNS.read() / "smoke_data"
