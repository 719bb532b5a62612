"""Which loss trains DSA's indexer at each step: the dense one in the first steps, then the sparse.

The page `dsa_dense_loss_warmup` queries this in every layer. Megatron's training loop announces
each step; a custom loop does so on every rank, with the number of completed iterations, which a
checkpoint restores:

    from cppmega.features.dsa import loss_schedule as dsa_loss_schedule

    for iteration in range(done, train_iters):
        dsa_loss_schedule.begin_step(iteration)
        ...

The loss depends on nothing else, so micro-batches, recomputations and a resumed run agree.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from cppmega.errors import CppmegaError
from cppmega.host.cuda_graphs import cuda_graphs

GATE = "CPPMEGA_LEMYX_DSA"
STEPS = "CPPMEGA_DSA_DENSE_LOSS_STEPS"
RECORD = "cppmega_dsa_dense_loss_steps"
"""Name of the number of steps among Megatron's arguments, which every checkpoint holds."""

_SET = f"export {STEPS}=N with the number of steps, or --set dsa_dense_loss_steps=N"

_iteration: int | None = None
"""Iterations completed when this step began; None: not announced."""
_begun = False
"""Whether a step has begun in this process, so that the ranks are known to agree."""


def dense_steps(environ: Mapping[str, str] = os.environ) -> int:
    """The number of steps with the dense loss.

    Raises:
        CppmegaError: `dsa-dense-loss-steps`.
    """
    text = environ.get(STEPS, "").strip()
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise CppmegaError(
        "dsa-dense-loss-steps",
        f"{GATE} is on, and {STEPS}={text!r} is not a number of steps."
        if text
        else f"{GATE} is on, and no number of steps is set.",
        "The indexer's loss is dense up to a stated step; without one it would never change.",
        _SET,
    )


def stated_steps(environ: Mapping[str, str] = os.environ) -> int | None:
    """The number of steps with the dense loss, or None where the environment states none.

    Raises:
        CppmegaError: `dsa-dense-loss-steps`, if the text is not a number of steps.
    """
    return dense_steps(environ) if environ.get(STEPS) else None


def begin_step(iteration: int | None) -> int | None:
    """Begin a training step; when the indexer's loss changes, rank 0 prints which one it is.

    Args:
        iteration: the number of completed iterations; None: not known, and no DSA layer can train.

    Returns:
        The number of steps with the dense loss; None where none is stated.

    Raises:
        CppmegaError: `dsa-dense-loss-differs`, `dsa-dense-loss-steps`.
    """
    global _iteration, _begun
    steps, first = stated_steps(), not _begun
    if first:
        _refuse_disagreement(steps, iteration)
    changes = iteration == steps != _iteration
    if steps is not None and iteration is not None and (first or changes) and _rank() == 0:
        print(_remark(steps, iteration), flush=True)
    _iteration, _begun = iteration, True
    return steps


def uses_sparse_loss(config: Any) -> bool:
    """Whether a layer that trains in this step has the sparse loss.

    Raises:
        CppmegaError: `dsa-dense-loss-without-step`, `dsa-dense-loss-steps`, and, while the loss is
            dense, the errors of `obstacles`.
    """
    steps = dense_steps()
    if _iteration is None:
        raise CppmegaError(
            "dsa-dense-loss-without-step",
            "A DSA layer trains its indexer, but the current step is not known.",
            f"The loss is dense in the first {steps} steps and sparse after them.",
            "call cppmega.features.dsa.loss_schedule.begin_step(iteration) on every rank before "
            "each step, with the number of iterations done",
        )
    if _iteration >= steps:
        return bool(config.dsa_indexer_use_sparse_loss)
    for obstacle in obstacles(config):
        raise obstacle
    return False


def obstacles(config: Any) -> Iterator[CppmegaError]:
    """Yield an error for each option of a run or a model that rules out the dense steps."""
    if not getattr(config, "dsa_indexer_loss_coeff", None):
        yield _ineffective("The indexer has no loss: dsa_indexer_loss_coeff is 0.", _COEFFICIENT)
    if not getattr(config, "dsa_indexer_use_sparse_loss", False):
        yield _ineffective("The indexer's loss is dense in every step.", _SPARSE)
    if cuda_graphs(config) != "none":
        yield CppmegaError(
            "dsa-dense-loss-in-graphs",
            f"{GATE} is on together with CUDA graphs.",
            "A captured step replays its own loss: the indexer would keep the dense one.",
            "--cuda-graph-impl none up to the switch, then resume with graphs and without "
            f"{GATE}; or unset {GATE} and apply again",
        )
    if getattr(config, "dsa_kernel_backend", None) == "cudnn" and (limit := _cudnn(config)):
        yield CppmegaError(
            "dsa-dense-loss-cannot-run",
            f"The DSA backend cudnn has no dense loss {limit}.",
            "Every rank would stop in its first step.",
            f"--dsa-kernel-backend none, or unset {GATE} and apply again",
        )


_COEFFICIENT = "--dsa-indexer-loss-coeff with a value above 0"
_SPARSE = "--dsa-indexer-use-sparse-loss"


def _ineffective(what: str, instead: str) -> CppmegaError:
    return CppmegaError(
        "dsa-dense-loss-changes-nothing",
        f"{GATE} is on. {what}",
        "It would seem to be on, but no step would differ.",
        f"{instead}, or unset {GATE} and apply again",
    )


def _cudnn(config: Any) -> str:
    if config.context_parallel_size > 1:
        return "with context parallelism"
    shared = (getattr(config, "dsa_indexer_topk_freq", None) or 1) > 1
    return "with keys that layers share" if shared else ""


def remark_on_checkpoint(saved: Any) -> str:
    """The line for a run that resumes with a different number of dense steps; "" if it is equal.

    Args:
        saved: Megatron's arguments in the checkpoint.
    """
    then, now = getattr(saved, RECORD, None) or 0, stated_steps() or 0
    if then == now:
        return ""
    return (
        f"cppmega: the checkpoint was saved with the DSA indexer's dense loss in its first {then} "
        f"steps, this run has it in the first {now}"
    )


def _remark(steps: int, iteration: int) -> str:
    line = f"cppmega: step {iteration + 1}: the loss of the DSA indexer "
    if iteration == steps:
        return f"{line}changes from dense to sparse (dense in the first {steps} steps)"
    if iteration < steps:
        return f"{line}is dense, and sparse from step {steps + 1} on"
    return f"{line}is sparse, and was dense in the first {steps} steps"


def _refuse_disagreement(steps: int | None, iteration: int | None) -> None:
    group = _distributed()
    if group is None:
        return
    everyone: list[Any] = [None] * group.get_world_size()
    group.all_gather_object(everyone, (steps, iteration))
    if len(set(everyone)) > 1:
        by_rank = "; ".join(
            f"rank {everyone.index(own)} has {own[0] or 0} dense steps at iteration {own[1]}"
            for own in dict.fromkeys(everyone)
        )
        raise CppmegaError(
            "dsa-dense-loss-differs",
            f"The ranks disagree on the loss of the DSA indexer: {by_rank}.",
            "They would train one indexer with two losses.",
            f"set the same {STEPS} on every host, and resume from one checkpoint",
        )


def _rank() -> int:
    group = _distributed()
    return int(group.get_rank()) if group is not None else 0


def _distributed() -> Any:
    found = getattr(sys.modules.get("torch"), "distributed", None)
    return found if found is not None and found.is_initialized() else None
