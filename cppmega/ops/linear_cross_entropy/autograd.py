"""The two backward schemes of linear cross-entropy, over `chunks.walk`.

`DeferredScalar` computes the gradients in the forward and multiplies by one number in the backward;
`InBackward` computes them in the backward, from logits that it keeps or, with three numbers per
token, computes again. Both can sum dX over the tensor-parallel group in the backward, and add dW to
`MainGrad` if there is one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cppmega.errors import CppmegaError
from cppmega.ops.common.main_grad import MainGrad
from cppmega.ops.common.once_differentiable import once_differentiable
from cppmega.ops.linear_cross_entropy.chunks import ChunkKernels, Problem, Softmax, walk

PROMISE_TOLERANCE = 1e-5
"""Relative error per row up to which an upstream gradient is `scalar * weight`.

A loss function multiplies in fp32 a few times, with an error of 6e-8 each; a violation of the
guarantee (a second mask, another weighting) differs by far more.
"""

_FP16_GAIN = 2.0**15
"""fp16 gradients of logits are at most 2**15, so a probability of 2e-9 is still a normal number."""


def main_grad_of(weight: Tensor) -> MainGrad:
    """The buffer to which the gradient of the head's weight is added.

    Raises:
        CppmegaError: `main-grad-missing`: there is none, or Megatron-FSDP manages it.
    """
    found = MainGrad.of(weight)
    if found is None:
        raise CppmegaError(
            "main-grad-missing",
            "gradient_accumulation_fusion is enabled, but the weight has no main_grad, or "
            "Megatron-FSDP manages it.",
            "Its gradient would be lost, or would overwrite that of another use of the weight.",
            "wrap the model in DistributedDataParallel, or turn off gradient_accumulation_fusion",
        )
    return found


def deferred_scalar(upstream: Tensor, weights: Tensor, caller: str) -> Tensor:
    """Return the scalar of `upstream == scalar * weights`, and check that there is one.

    Args:
        upstream: `[N]`, gradient that reached the loss, 0 on ignored rows.
        weights: `[N]`, 0 on ignored rows.
        caller: the name in the error message.

    Returns:
        One fp64 number on the device, without waiting for it: the least-squares ratio, which is
        exact for a mask of zeros and ones; 0 if all weights are 0. An upstream gradient with inf or
        nan is not checked, so that a loss scaler sees it.

    Raises:
        RuntimeError: there is none; raised at once on the CPU, as a device-side assertion on CUDA.
    """
    gradient, wide = upstream.double(), weights.double()
    energy = (wide * wide).sum()
    some = energy > 0
    ratio = (gradient * wide).sum() / torch.where(some, energy, 1.0)
    scalar = torch.where(some, ratio, (gradient * 0.0).sum())
    expected = scalar * wide
    kept = ((gradient - expected).abs() <= PROMISE_TOLERANCE * expected.abs()).all()
    torch._assert_async(
        kept | ~gradient.isfinite().all(),
        f"{caller}: the gradient that reached the per-token loss is not one scalar times "
        'loss_weights, as upstream="weighted-scalar" promised. Pass the true weights, or set '
        "CPPMEGA_LINEAR_CE_UPSTREAM=arbitrary.",
    )
    return scalar


def _in_range(weights: Tensor, dtype: torch.dtype) -> tuple[Tensor, float, Tensor | None]:
    """Return row weights within the range of fp16, and the two factors that undo the scaling.

    Returns:
        Weights for the row kernel, a factor within the GEMMs, and a factor after them (a number on
        the device, None for 1).
    """
    if dtype != torch.float16 or weights.numel() == 0:
        return weights, 1.0, None
    peak = weights.abs().amax()
    peak = torch.where(peak == 0, 1.0, peak)
    return weights / peak * _FP16_GAIN, 1.0 / _FP16_GAIN, peak


def _finish(
    hidden_grad: Tensor | None,
    weight_grad: Tensor | None,
    factor: Tensor | None,
    problem: Problem,
    dtypes: tuple[torch.dtype, torch.dtype],
    reduce_hidden_grad: bool,
    main_grad: MainGrad | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Multiply dX and dW by the last factor, sum dX over the ranks, and return or accumulate dW."""
    kernels = problem.kernels
    if hidden_grad is not None:
        hidden_grad = _times(kernels, hidden_grad, factor, dtypes[0])
        if reduce_hidden_grad and problem.tp_group is not None:
            dist.all_reduce(hidden_grad, group=problem.tp_group)
    if weight_grad is not None:
        if main_grad is None:
            weight_grad = _times(kernels, weight_grad, factor, dtypes[1])
        else:
            if factor is None:
                main_grad.buffer.add_(weight_grad)
            else:
                main_grad.buffer.addcmul_(weight_grad, factor)
            weight_grad = main_grad.added()
    return hidden_grad, weight_grad


def _times(
    kernels: ChunkKernels, source: Tensor, factor: Tensor | None, dtype: torch.dtype
) -> Tensor:
    return source.to(dtype) if factor is None else kernels.scaled(source, factor, dtype)


class DeferredScalar(torch.autograd.Function):
    """Three GEMMs, all in the forward; exact if the upstream gradient is scalar * weights."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        problem: Problem,
        weights: Tensor,
        reduce_hidden_grad: bool,
        main_grad: MainGrad | None,
        caller: str,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Loss `[N]` and argmax `[N]` or None; see `linear_cross_entropy` for the arguments."""
        row_weights, gradient_scale, factor = _in_range(weights, hidden.dtype)
        done = walk(
            problem,
            hidden,
            weight,
            row_weights=row_weights,
            gradient_scale=gradient_scale,
            want_hidden_grad=ctx.needs_input_grad[0],
            want_weight_grad=ctx.needs_input_grad[1],
        )
        ctx.save_for_backward(done.hidden_grad, done.weight_grad, weights, factor)
        ctx.problem, ctx.main_grad, ctx.caller = problem, main_grad, caller
        ctx.reduce_hidden_grad = reduce_hidden_grad
        ctx.dtypes = (hidden.dtype, weight.dtype)
        ctx.set_materialize_grads(False)
        if done.argmax is not None:
            ctx.mark_non_differentiable(done.argmax)
        return done.loss, done.argmax

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor | None, _: None) -> tuple[Any, ...]:
        """Multiply the gradients that the forward computed by the scalar."""
        if upstream is None:
            return (None,) * 7
        hidden_grad, weight_grad, weights, factor = ctx.saved_tensors
        counted = upstream.masked_fill(ctx.problem.ignored, 0)
        scalar = deferred_scalar(counted, weights, ctx.caller)
        if factor is not None:
            scalar = scalar * factor
        grads = _finish(
            hidden_grad,
            weight_grad,
            scalar.to(weights.dtype),
            ctx.problem,
            ctx.dtypes,
            ctx.reduce_hidden_grad,
            ctx.main_grad,
        )
        return (*grads, None, None, None, None, None)


class InBackward(torch.autograd.Function):
    """Logits in the forward; dX and dW in the backward, before them the logits if none are kept.

    With `promised` weights, it keeps them: three GEMMs. Without, it computes them again: four.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        problem: Problem,
        reduce_hidden_grad: bool,
        main_grad: MainGrad | None,
        promised: Tensor | None,
        caller: str,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Loss `[N]` and argmax `[N]` or None; see `linear_cross_entropy` for the arguments."""
        done = walk(problem, hidden, weight, keep_logits=promised is not None)
        ctx.save_for_backward(hidden, weight, promised, done.logits, *done.softmax)
        ctx.problem, ctx.main_grad, ctx.caller = problem, main_grad, caller
        ctx.reduce_hidden_grad = reduce_hidden_grad
        ctx.set_materialize_grads(False)
        if done.argmax is not None:
            ctx.mark_non_differentiable(done.argmax)
        return done.loss, done.argmax

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor | None, _: None) -> tuple[Any, ...]:
        """Compute the gradients for any upstream gradient, or for one that is as promised."""
        if upstream is None:
            return (None,) * 7
        hidden, weight, promised, logits, *softmax = ctx.saved_tensors
        problem: Problem = ctx.problem
        wide = problem.kernels.accumulation_dtype(hidden.dtype)
        counted = upstream.to(wide).masked_fill(problem.ignored, 0)
        if promised is not None:
            deferred_scalar(counted, promised, ctx.caller)
        row_weights, gradient_scale, factor = _in_range(counted, hidden.dtype)
        main_grad: MainGrad | None = ctx.main_grad
        # The GEMM itself adds to main_grad if no factor remains to be applied afterwards.
        straight = main_grad is not None and factor is None and main_grad.buffer.dtype == wide
        done = walk(
            problem,
            hidden,
            weight,
            row_weights=row_weights,
            gradient_scale=gradient_scale,
            softmax=Softmax(*softmax),
            logits=logits,
            want_hidden_grad=ctx.needs_input_grad[0],
            want_weight_grad=ctx.needs_input_grad[1],
            accumulate_into=main_grad.buffer if straight and main_grad is not None else None,
        )
        hidden_grad, weight_grad = _finish(
            done.hidden_grad,
            done.weight_grad,
            factor,
            problem,
            (hidden.dtype, weight.dtype),
            ctx.reduce_hidden_grad,
            main_grad,
        )
        if straight and main_grad is not None:
            weight_grad = main_grad.added()
        return (hidden_grad, weight_grad, None, None, None, None, None)
