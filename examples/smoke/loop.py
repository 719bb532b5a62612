"""A training loop of one's own on CPU: any number of gloo ranks, checkpoints, SIGTERM.

The guard asks for one line, `for step in guard.steps(...)`. To a launcher the loop behaves like
Megatron's: the same checkpoint names, the same `--save-interval` and `--exit-interval`, and SIGTERM
to one rank makes all ranks save and end.
"""

from __future__ import annotations

import math
import signal
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from cppmega import calls, guard
from cppmega.errors import CppmegaError
from cppmega.host.wording import counted
from cppmega.overlay import record as overlay_record
from cppmega.proof import cpu_shims
from cppmega.recipe import Recipe
from cppmega.recipe.run_options import RunOptions
from cppmega.runs import metrics, rank_progress
from cppmega.runs.metrics import LoggedStep, Start
from cppmega.runs.spikes import Spikes
from cppmega.training.nonfinite import Watch
from cppmega.training.own_loop import recipe_of_rank
from cppmega.tree import accepted

from . import checkpoint, corpus, packs
from . import model as smoke_model
from .records import CurvePoint
from .training_step import learning_rate, over_ranks, train_step


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
        flag = torch.tensor([float(self._received)])
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
        return bool(flag.item())


def train(recipe: Recipe, options: RunOptions, data: Path) -> None:
    """Train with the options of the trainer's command line, as `cppmega launch` does."""
    loop = Loop(
        data=data,
        steps=recipe.train_iters,
        save=options.save,
        load=options.load,
        save_interval=options.save_interval,
        exit_interval=options.exit_interval,
        log_interval=options.log_interval,
        metrics=options.metrics,
    )
    run(recipe, loop)


def run(recipe: Recipe, loop: Loop) -> Outcome:
    """Train; returns at the last step, at the exit interval, or after SIGTERM with a checkpoint.

    Raises:
        CppmegaError: `wrong-world-size`, `first-loss-implausible`, `step-not-finite`,
            `already-trained`.
    """
    stop = _Stop()
    torch.set_num_threads(1)  # the matrices are too small to share
    torch.manual_seed(recipe.seed)
    cpu_shims.init_distributed()
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    plan = recipe_of_rank(recipe, world)
    outcome = Outcome(0, [], _compile_helpers())
    if rank == 0:
        packs.build(loop.data)
    torch.distributed.barrier()
    model, ddp, optimizer = smoke_model.with_optimizer(plan)
    watch = Watch()
    if loop.load is not None:
        outcome.first = checkpoint.load(loop.load, model, optimizer, _record())
    log = _Log(recipe, loop, outcome.first, rank)
    log.announce(world)
    if outcome.first >= loop.steps:
        raise CppmegaError(
            "already-trained",
            f"The checkpoint has {outcome.first} steps, and {loop.steps} are requested.",
            "There is nothing left to train.",
            f"--set train_iters={outcome.first + loop.steps} resumes the training",
        )
    # Every rank reads the same documents and takes its own batches of them.
    batches = packs.packs(loop.data / "train", plan, recipe.seed)
    mine = islice(batches, outcome.first * world + rank, None, world)
    others = {"async_save": False, "use_layer_wise_distributed_optimizer": False}
    args = (model.config, ddp.ddp_config, others)
    marks, saved, step = rank_progress.of_this_rank(), outcome.first, outcome.first
    numbers = range(outcome.first + 1, loop.steps + 1)
    for step in guard.steps(numbers, *args, unguarded=loop.unguarded):
        started = time.monotonic()
        marks.begin_step()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(plan, step)
        batch = next(mine)
        marks.read_batch()
        point = over_ranks(train_step(plan, step, model, ddp, optimizer, batch, watch), world)
        if step == 1:
            _check_first_loss(point.loss, plan)
        outcome.curve.append(point)
        log.step(point, time.monotonic() - started)
        ended = stop.wanted()
        if loop.save and (ended or (loop.save_interval and step % loop.save_interval == 0)):
            checkpoint.save(loop.save, model, optimizer, step, _record())
            saved = step
            guard.after_first_save()
        if ended or (loop.exit_interval and step % loop.exit_interval == 0):
            if rank == 0 and ended:
                print(f"cppmega: ending at step {step} after receiving SIGTERM", flush=True)
            break
    guard.after_first_step()  # a run that was ended in its first step has left the loop early
    if loop.save and saved != step:
        checkpoint.save(loop.save, model, optimizer, step, _record())
        guard.after_first_save()
    return outcome


def _record() -> overlay_record.OverlayRecord:
    guarded = guard.active()
    if guarded is None:
        return overlay_record.OverlayRecord(digest=overlay_record.NONE)
    return overlay_record.record_of(guarded.receipt, accepted.in_this_process(), calls.allowed())


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


class _Log:
    """What the first rank prints, and appends to the metrics."""

    def __init__(self, recipe: Recipe, loop: Loop, first: int, rank: int) -> None:
        self.recipe, self.loop, self.first, self.rank = recipe, loop, first, rank
        self.started = time.monotonic()
        self.spikes = Spikes()

    def announce(self, world: int) -> None:
        """State what is about to be trained."""
        if self.rank != 0:
            return
        loop, recipe = self.loop, self.recipe
        digest, data = _record().digest, corpus.fingerprint(loop.data)
        print(
            f"cppmega: recipe {recipe.name}, {recipe.precision}, {counted(world, 'rank')} on CPU, "
            f"overlay {digest}, data {data}, "
            + (f"resuming at step {self.first + 1}" if self.first else "from scratch"),
            flush=True,
        )
        if loop.metrics is not None:
            load = str(loop.load) if loop.load else None
            start = Start(
                start=recipe.name, overlay=digest, data=data, load=load, train_iters=loop.steps
            )
            metrics.append(loop.metrics, start)

    def step(self, point: CurvePoint, seconds: float) -> None:
        """Log a step."""
        if self.rank != 0:
            return
        loop, recipe = self.loop, self.recipe
        if point.step % loop.log_interval == 0 or point.step == loop.steps:
            mtp = math.nan if point.mtp is None else point.mtp
            progress = f"step {point.step}/{loop.steps}  loss {point.loss:.3f}  mtp {mtp:.3f}"
            speed = (point.step - self.first) / (time.monotonic() - self.started)
            print(f"{progress}  wrong MTP labels {point.wrong}  {speed:.1f} steps/s", flush=True)
        if spike := self.spikes.remark(point.loss, point.grad_norm):
            print(f"cppmega: SPIKE at step {point.step}: {spike}", flush=True)
        if loop.metrics is not None:
            mtp_losses = {} if point.mtp is None else {"mtp loss": point.mtp}
            logged = LoggedStep(
                step=point.step,
                seconds=seconds,
                tokens_per_second=recipe.global_batch_size * recipe.seq_length / seconds,
                loss=point.loss,
                grad_norm=point.grad_norm,
                losses={"lm loss": point.loss} | mtp_losses,
            )
            metrics.append(loop.metrics, logged)
