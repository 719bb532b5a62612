"""The training loop of recipes that run on CPU: any number of gloo ranks, checkpoints, SIGTERM.

It behaves like Megatron's own where a launcher can see it: the same names of checkpoints, the same
`--save-interval` and `--exit-interval`, and SIGTERM to one rank makes all of them save and end.
"""

from __future__ import annotations

import math
import signal
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cppmega import guard
from cppmega.errors import CppmegaError
from cppmega.host import env
from cppmega.overlay import record as overlay_record
from cppmega.recipe import Recipe
from cppmega.recipe.run_options import RunOptions
from cppmega.runs import metrics
from cppmega.runs.metrics import LoggedStep, Start
from cppmega.smoke import checkpoint as smoke_state
from cppmega.training.batch import check_batch
from cppmega.training.nonfinite import Watch, gradient_error, loss_error
from cppmega.tree import accepted

SEED = 1234

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """What belongs to one start of a recipe and not to the recipe."""

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


@dataclass(slots=True)
class Outcome:
    """What happened."""

    first: int
    """Steps that the loaded checkpoint had."""
    rows: list[Row]
    """One for each step."""
    compile_helpers: str
    """How stock's start-up helper ended, where it would have ended a real run."""


class _Stop:
    """SIGTERM to any rank is known to all of them after the step."""

    def __init__(self) -> None:
        self._received = False
        signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, number: int, frame: Any) -> None:
        self._received = True

    def wanted(self) -> bool:
        """Whether some rank was asked to end."""
        import torch

        flag = torch.tensor([float(self._received)])
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
        return bool(flag.item())


def run(recipe: Recipe, loop: Loop) -> Outcome:
    """Train; returns at the last step, at the exit interval, or after SIGTERM with a checkpoint.

    Raises:
        CppmegaError: `wrong-world-size`, `first-loss-implausible`, `loss-not-finite`,
            `gradient-not-finite`, `already-trained`.
    """
    import torch

    from cppmega.proof import cpu_shims
    from cppmega.smoke import model as smoke_model
    from cppmega.smoke import packs as smoke_data

    stop = _Stop()
    torch.set_num_threads(1)  # the matrices are too small to share
    torch.manual_seed(SEED)
    cpu_shims.init_distributed()
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    plan = of_a_rank(recipe, world)
    outcome = Outcome(0, [], _compile_helpers())
    if rank == 0:
        smoke_data.build(loop.data)
    torch.distributed.barrier()
    model, ddp, optimizer = smoke_model.with_optimizer(plan)
    watch = Watch()
    if loop.load is not None:
        outcome.first = smoke_state.load(loop.load, model, optimizer, _record())
    _announce(recipe, loop, outcome.first, rank, world)
    if outcome.first >= loop.steps:
        raise CppmegaError(
            "already-trained",
            f"The checkpoint has {outcome.first} steps, and {loop.steps} are asked for.",
            "There is nothing left to train.",
            f"--set train_iters={outcome.first + loop.steps} trains on",
        )
    # Every rank reads the same documents and takes its own packs of them.
    packs = islice(
        smoke_data.packs(loop.data / "train", plan, SEED), outcome.first * world + rank, None, world
    )
    args = SimpleNamespace(**arguments(plan))
    started, saved, step = time.monotonic(), outcome.first, outcome.first
    for step in guard.steps(range(outcome.first + 1, loop.steps + 1), args):
        begun = time.monotonic()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(plan, step)
        row = _together(_step(plan, model, ddp, optimizer, next(packs), watch), world)
        if step == 1:
            _check_first_loss(row["loss"], plan)
        outcome.rows.append(row)
        tokens = recipe.global_batch_size * recipe.seq_length
        _log(loop, step, row, tokens, begun, started, outcome.first, rank)
        ended = stop.wanted()
        if loop.save and (ended or (loop.save_interval and step % loop.save_interval == 0)):
            smoke_state.save(loop.save, model, optimizer, step, _record())
            saved = step
            guard.after_first_save(args)
        if ended or (loop.exit_interval and step % loop.exit_interval == 0):
            if rank == 0 and ended:
                print(f"cppmega: ending at step {step} after receiving SIGTERM", flush=True)
            break
    guard.after_first_step(args)  # a run that was ended in its first step has left the loop early
    if loop.save and saved != step:
        smoke_state.save(loop.save, model, optimizer, step, _record())
        guard.after_first_save(args)
    return outcome


def learning_rate(plan: Recipe, step: int) -> float:
    """Rises over the warm-up, if there is one, and stays."""
    return plan.lr * min(1.0, step / max(plan.lr_warmup_iters, 1))


def of_a_rank(recipe: Recipe, world: int) -> Recipe:
    """The recipe with the sequences of one rank: the global batch is the recipe's for any number.

    Raises:
        CppmegaError: `wrong-world-size`.
    """
    share, rest = divmod(recipe.global_batch_size, world)
    if rest or not share:
        raise CppmegaError(
            "wrong-world-size",
            f"A global batch of {recipe.global_batch_size} cannot be shared by {world} ranks.",
            "Another batch is another run.",
            f"--nproc with a divisor of {recipe.global_batch_size}",
        )
    return recipe.with_(micro_batch_size=share, global_batch_size=share)


def arguments(plan: Recipe) -> dict[str, Any]:
    """What the pages are asked about: Megatron's names."""
    return {
        "mtp_num_layers": plan.mtp_num_layers,
        "context_parallel_size": 1,
        "tensor_model_parallel_size": 1,
        "bf16": False,
        "fp16": False,
        "position_embedding_type": "learned_absolute",
        "cross_entropy_loss_fusion": False,
    }


def _record() -> overlay_record.Record:
    guarded = guard.active()
    if guarded is None:
        return {"digest": overlay_record.NONE}
    return overlay_record.of(guarded.receipt, accepted.in_this_process())


def _announce(recipe: Recipe, loop: Loop, first: int, rank: int, world: int) -> None:
    """One line for people and one object for machines: what is about to be trained."""
    from cppmega.smoke import corpus as smoke_text

    if rank != 0:
        return
    digest, data = _record()["digest"], smoke_text.fingerprint(loop.data)
    print(
        f"cppmega: recipe {recipe.name}, {recipe.precision}, {world} ranks on CPU, overlay "
        f"{digest}, data {data}, " + (f"going on at step {first + 1}" if first else "from scratch"),
        flush=True,
    )
    if loop.metrics is not None:
        load = str(loop.load) if loop.load else None
        start = Start(start=recipe.name, overlay=digest, data=data, load=load)
        metrics.append(loop.metrics, start)


def _compile_helpers() -> str:
    """What Megatron's trainer calls first. Stock ends the process here; we note it and go on."""
    from megatron.core.datasets.utils import compile_helpers

    try:
        compile_helpers()
    except SystemExit as error:
        print(f"stock: compile_helpers ended with exit status {error.code}; a real run stops here")
        return f"exit {error.code}"
    return ""


def _step(
    plan: Recipe, model: Any, ddp: Any, optimizer: Any, pack: Any, watch: Watch
) -> dict[str, Any]:
    """Forward, backward, update; the losses as Megatron sees them, and its wrong MTP labels."""
    import torch
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    check_batch(pack.tokens, pack.labels, pack.loss_mask, plan.vocab_size)
    ddp.zero_grad_buffer()
    MTPLossLoggingHelper.tracker.clear()
    watch.begin(model)
    per_token = pack.through(ddp)
    watch.passed(model)
    loss = (per_token * pack.loss_mask).sum() / pack.loss_mask.sum()
    if not math.isfinite(loss.item()):
        raise loss_error(loss.item(), watch)
    watch.end()
    loss.backward()
    ddp.finish_grad_sync()
    for parameter in model.parameters():
        parameter.grad = parameter.main_grad
    try:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    except RuntimeError as error:  # before it has multiplied every gradient by such a norm
        raise gradient_error([model], "The gradient norm is not finite") from error
    optimizer.step()
    # DDP adds what it finds in `grad` to `main_grad`: they must not stay one tensor.
    optimizer.zero_grad(set_to_none=True)
    tracker = MTPLossLoggingHelper.tracker
    mtp = tracker.get("loss_values", tracker.get("values"))  # renamed in 0.19
    wrong, labels = _wrong_labels(plan, pack)
    return {
        "loss": loss.item(),
        "mtp": float(mtp.mean()) if mtp is not None else math.nan,
        "grad_norm": norm.item(),
        "wrong": wrong,
        "labels": labels,
    }


def _together(row: Row, world: int) -> Row:
    """The step of all ranks: losses are means, labels are counts."""
    import torch

    if world == 1:
        return row
    values = torch.tensor([row[k] for k in ("loss", "mtp", "wrong", "labels")], dtype=torch.float64)
    torch.distributed.all_reduce(values)
    loss, mtp, wrong, labels = values.tolist()
    means = {"loss": loss / world, "mtp": mtp / world}
    return {**row, **means, "wrong": int(wrong), "labels": int(labels)}


def _wrong_labels(plan: Recipe, pack: Any) -> tuple[int, int]:
    """MTP labels that Megatron trains on, against the truth: (wrong or missing, all true ones)."""
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    labels, mask, wrong, true = pack.labels, pack.loss_mask, 0, 0
    for depth in range(1, plan.mtp_num_layers + 1):
        labels, _ = roll_tensor(labels, -1, -1, None, pack.params())
        mask, _ = roll_tensor(mask, -1, -1, None, pack.params())
        true_labels, true_mask = pack.true_labels(depth)
        differs = (mask != true_mask) | ((labels != true_labels) & (true_mask > 0))
        wrong += int(differs.sum())
        true += int(true_mask.sum())
    return wrong, true


def _check_first_loss(loss: float, plan: Recipe) -> None:
    expected = math.log(plan.vocab_size)
    if abs(loss - expected) > 1:
        raise CppmegaError(
            "first-loss-implausible",
            f"The first loss is {loss:.2f}; a fresh model has ln V = {expected:.2f}.",
            "The initialisation, the data or a patch is wrong: such a run's numbers mean nothing.",
            "look at the last thing that changed",
        )


def _log(
    loop: Loop,
    step: int,
    row: Row,
    tokens: int,
    begun: float,
    started: float,
    first: int,
    rank: int,
) -> None:
    if rank != 0:
        return
    now = time.monotonic()
    if step % loop.log_interval == 0 or step == loop.steps:
        line = f"step {step}/{loop.steps}  loss {row['loss']:.3f}  mtp {row['mtp']:.3f}"
        speed = (step - first) / (now - started)
        print(f"{line}  wrong MTP labels {row['wrong']}  {speed:.1f} steps/s", flush=True)
    if loop.metrics is not None:
        metrics.append(
            loop.metrics,
            LoggedStep(
                step=step,
                seconds=now - begun,
                tokens_per_second=tokens / (now - begun),
                loss=row["loss"],
                grad_norm=row["grad_norm"],
                losses={"lm loss": row["loss"], "mtp loss": row["mtp"]},
            ),
        )


def train(recipe: Recipe, options: RunOptions) -> None:
    """A loop recipe as the trainer's command line asks for it.

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
    )
    run(recipe, loop)


def refuse_options(recipe: Recipe, options: RunOptions) -> None:
    """No option is left out silently.

    Raises:
        CppmegaError: `not-supported`.
    """
    given = {
        "mock-data": options.mock_data,
        "data-cache": options.data_cache,
        "tensorboard": options.tensorboard,
        "wandb-project": options.wandb_project,
        "wandb-name": options.wandb_name,
        "tokenizer": options.tokenizer,
        "eod": options.eod,
    }
    wrong = [f"--{name}" for name, value in given.items() if value]
    wrong += [" ".join(recipe.arguments)] if recipe.arguments else []
    if wrong:
        raise CppmegaError(
            "not-supported",
            f"Recipe {recipe.name} runs in a loop on CPU, which does not take {', '.join(wrong)}.",
            "The run would go on without it, and nobody would notice.",
            "leave it out",
        )


def folder_of(data: tuple[str, ...], recipe: Recipe) -> Path:
    """Where the loop's corpus is; it builds its own, from our sources.

    Raises:
        CppmegaError: `not-supported`.
    """
    if len(data) > 1:
        raise CppmegaError(
            "not-supported",
            f"Recipe {recipe.name} takes one folder of data, not {len(data)}.",
            "It builds its own corpus there and cannot mix.",
            "name one folder, or none",
        )
    return Path(data[0]) if data else env.RUNS.read() / "smoke_data"
