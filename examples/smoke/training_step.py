"""One training step of the CPU smoke run, and the MTP labels that Megatron computed for it."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import torch

from cppmega.recipe import Recipe
from cppmega.training.batch import check_batch
from cppmega.training.nonfinite import Watch, gradient_error, loss_error
from cppmega.training.packing import Packed

from .packs import loss_per_token, true_labels
from .records import CurvePoint


def learning_rate(plan: Recipe, step: int) -> float:
    """The rate of a step: it rises linearly over the warm-up, if there is one, and then stays."""
    return plan.lr * min(1.0, step / max(plan.lr_warmup_iters, 1))


def train_step(
    plan: Recipe, step: int, model: Any, ddp: Any, optimizer: Any, batch: Packed, watch: Watch
) -> CurvePoint:
    """Run forward, backward and update; return the losses as Megatron sees them.

    Raises:
        CppmegaError: `token-out-of-vocabulary`, `step-not-finite`.
    """
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    check_batch(batch.tokens, batch.labels, batch.loss_mask, plan.vocab_size)
    ddp.zero_grad_buffer()
    MTPLossLoggingHelper.tracker.clear()
    watch.begin(model)
    per_token = loss_per_token(ddp, batch)
    watch.passed(model)
    loss = (per_token * batch.loss_mask).sum() / batch.loss_mask.sum()
    if not math.isfinite(loss.item()):
        raise loss_error(loss.item(), watch)
    watch.end()
    loss.backward()
    ddp.finish_grad_sync()
    norm = _update(model, optimizer, plan.clip_grad)
    tracker = MTPLossLoggingHelper.tracker
    mtp = tracker.get("loss_values", tracker.get("values"))  # renamed in 0.19
    wrong, labels = wrong_labels(plan.mtp_num_layers, batch)
    return CurvePoint(
        step=step,
        loss=loss.item(),
        mtp=float(mtp.mean()) if mtp is not None else None,
        grad_norm=norm,
        wrong=wrong,
        labels=labels,
    )


def _update(model: Any, optimizer: Any, clip: float) -> float:
    """Clip the gradients and step; the norm before clipping."""
    for parameter in model.parameters():
        parameter.grad = parameter.main_grad
    try:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip, error_if_nonfinite=True)
    except RuntimeError as error:  # before every gradient has been scaled by such a norm
        raise gradient_error([model], "The gradient norm is not finite") from error
    optimizer.step()
    # DDP adds `grad` to `main_grad`: they must not remain the same tensor.
    optimizer.zero_grad(set_to_none=True)
    return norm.item()


def over_ranks(point: CurvePoint, world: int) -> CurvePoint:
    """The step of all ranks: losses are averaged, labels are summed."""
    if world == 1:
        return point
    mine = [point.loss, point.mtp or 0.0, point.wrong, point.labels]
    values = torch.tensor(mine, dtype=torch.float64)
    torch.distributed.all_reduce(values)
    loss, mtp, wrong, labels = values.tolist()
    return msgspec.structs.replace(
        point,
        loss=loss / world,
        mtp=None if point.mtp is None else mtp / world,
        wrong=int(wrong),
        labels=int(labels),
    )


def wrong_labels(depths: int, batch: Packed) -> tuple[int, int]:
    """Count the MTP labels that Megatron computes wrongly or not at all, and all true ones."""
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    labels, mask, wrong, true = batch.labels, batch.loss_mask, 0, 0
    params = batch.params("cpu")
    for depth in range(1, depths + 1):
        labels, _ = roll_tensor(labels, -1, -1, None, params)
        mask, _ = roll_tensor(mask, -1, -1, None, params)
        expected, counted = true_labels(batch, depth)
        differs = (mask != counted) | ((labels != expected) & (counted > 0))
        wrong += int(differs.sum())
        true += int(counted.sum())
    return wrong, true
