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

import sys
from typing import Any

from cppmega.errors import CppmegaError
from cppmega.rules import check_model, combinations
from cppmega.sizes.dsa_loss import GATE as GATE
from cppmega.sizes.dsa_loss import STEPS as STEPS
from cppmega.sizes.dsa_loss import dense_steps as dense_steps
from cppmega.sizes.dsa_loss import stated_steps as stated_steps

RECORD = "cppmega_dsa_dense_loss_steps"
"""Name of the number of steps among Megatron's arguments, which every checkpoint holds."""

_iteration: int | None = None
"""Iterations completed when this step began; None: not announced."""
_begun = False
"""Whether a step has begun in this process, so that the ranks are known to agree."""


def begin_step(iteration: int | None) -> int | None:
    """Begin a training step; when the indexer's loss changes, rank 0 prints which one it is.

    Args:
        iteration: the number of completed iterations; None: not known, and no DSA layer can train.

    Returns:
        The number of steps with the dense loss; None where none is stated.

    Raises:
        CppmegaError: `dsa-dense-loss`.
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
        CppmegaError: `dsa-dense-loss`, and, while the loss is
            dense, the errors of rules that concern it.
    """
    steps = dense_steps()
    if _iteration is None:
        raise CppmegaError(
            "dsa-dense-loss",
            "A DSA layer trains its indexer, but the current step is not known.",
            f"The loss is dense in the first {steps} steps and sparse after them.",
            "call cppmega.features.dsa.loss_schedule.begin_step(iteration) on every rank before "
            "each step, with the number of iterations done",
        )
    if _iteration >= steps:
        return bool(config.dsa_indexer_use_sparse_loss)
    check_model(config, combinations.DENSE_STEPS, experimental_attention_variant="dsa")
    return False


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
            "dsa-dense-loss",
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
