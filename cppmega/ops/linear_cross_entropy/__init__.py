"""Cross-entropy of `hidden @ weight.T` without materializing the logits, for LM and MTP heads.

Computes the loss per token and optionally the arg-max token, and holds one chunk of logits at a
time. Supports a vocabulary that is split over a process group, padding columns, an ignored target,
a logit scale, and accumulation of dW in fp32, also directly into Megatron's `weight.main_grad`.

Three GEMMs or four. The unfused path runs three GEMMs (logits, dX, dW), so a kernel that recomputes
the logits in the backward is not faster. In training the upstream gradient of token i is `scalar *
loss_weights[i]`, with the weights (the loss mask) known in the forward and only the scalar
(1/tokens, the loss scale) unknown. If the caller guarantees this with `upstream="weighted-scalar"`,
dX and dW are computed in the forward, while the chunk of logits is available, with the weights
folded into each row; the backward multiplies by the scalar. Where dW is added to `main_grad` and
the logits of all computed rows are smaller than it (in bf16, at most `2 * H` tokens), they are kept
instead, and the backward computes dX and dW. The guarantee is checked on the device in every
backward, without waiting for it. Any other upstream gradient is supported with four GEMMs:
`upstream="arbitrary"`, the default.

Masked tokens cost nothing if the host knows how many count: with the guarantee, `counted_tokens=`
computes only those rows. A number that is too small is a device-side error.

Memory held between forward and backward with the guarantee: the logits, `2 * R * V/tp` bytes per
head in bf16 (1 GiB for R=4096 tokens at V=131072), where they are kept; else dX in the type of
hidden and dW in fp32, `4 * H * V/tp` bytes (2 GiB at H=4096). Without it, three fp32 numbers per
token.
Gradients cannot be added to `main_grad` in the forward, where the scalar is not known yet.

Numerics. Logits are rounded to the type of the inputs before the softmax, as in the unfused path;
the rest is fp32. A confident token keeps its precision: the sum without the target is kept
separate from the maximum (see `chunks.Softmax`), so neither `1 - p` nor the
loss is the difference of two large numbers. dlogits are rounded once for the tensor cores; dX, kept
in the type of hidden, is rounded once more when multiplied by the scalar. Errors against fp64 are
those of the unfused path or smaller (the benchmark prints both). fp16 gradients are computed with
the weights divided by the largest and multiplied by 2**15, so that neither a loss scale nor a small
1/tokens leaves the range, and dX is kept in fp32 until the scalar is known.

Source: the three-GEMM scheme is that of https://github.com/mgmalek/efficient_cross_entropy; weights
per row and the deferred scalar are additions.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from cppmega.errors import CppmegaError
from cppmega.host import env
from cppmega.ops.common.launch import on_device_of
from cppmega.ops.common.main_grad import MainGrad
from cppmega.ops.linear_cross_entropy import external
from cppmega.ops.linear_cross_entropy import naive as reference
from cppmega.ops.linear_cross_entropy.autograd import DeferredScalar, InBackward, main_grad_of
from cppmega.ops.linear_cross_entropy.chunks import (
    ChunkKernels,
    Problem,
    default_chunk_tokens,
    walk,
)

ENVIRONMENT = env.LINEAR_CE_KERNEL.name
BACKENDS = ("triton", "liger", "reference")
Upstream = Literal["weighted-scalar", "arbitrary"]
HiddenGrad = Literal["reduced", "partial"]

_COUNT = "cppmega_counted_tokens"
_LOG = logging.getLogger(__name__)
_logged: set[str] = set()
_Function = TypeVar("_Function", bound=Callable[..., Any])


class LinearCrossEntropyOutput(NamedTuple):
    """The result of `linear_cross_entropy`.

    Attributes:
        loss: shape of the targets, fp32 (fp64 for fp64 inputs), in nats, not multiplied by
            `loss_weights`; 0 where the target is ignored.
        argmax: shape of the targets, int64, no gradient: the token with the largest logit (the
            lowest id if tied), -1 where the target is ignored. None unless requested.
        backend: the backend that computed it.
    """

    loss: Tensor
    argmax: Tensor | None
    backend: str


def select_backend(
    requested: str | None, device: torch.device, dtype: torch.dtype
) -> tuple[str, str]:
    """Select the backend.

    Args:
        requested: a backend or "auto"; None reads `CPPMEGA_LINEAR_CE_KERNEL`, default "auto".
        device: of the tensors.
        dtype: of the tensors.

    Returns:
        A name from `BACKENDS` and the reason in one sentence; `auto` logs it once, on the last
        rank.

    Raises:
        CppmegaError: an unknown name, or a backend that was requested by name and cannot run here.
    """
    asked = requested or env.LINEAR_CE_KERNEL.read()
    if asked not in (*BACKENDS, "auto"):
        raise CppmegaError(
            "linear-ce-backend",
            f"{asked!r} is not a backend of linear cross-entropy.",
            "With a misspelled name, a kernel other than the measured one would run.",
            f"set {ENVIRONMENT} to auto, {', '.join(BACKENDS)}",
        )
    obstacle = _triton_obstacle(device, dtype) if asked in ("auto", "triton") else None
    if asked == "auto":
        name = "reference" if obstacle else "triton"
        reason = obstacle or f"{device.type} and {dtype}"
        say_once(f"linear cross-entropy: auto chose {name}: {reason}")
        return name, reason
    if obstacle:
        raise CppmegaError(
            "linear-ce-backend",
            f"Backend triton was requested, but: {obstacle}.",
            "Other backends differ in rounding and speed, and are not selected silently.",
            f"unset {ENVIRONMENT} (auto), or set it to reference",
        )
    return asked, "requested by name"


def _triton_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"the tensors are on {device.type}"
    if dtype == torch.float64:
        return "the tensors are fp64"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None


def say_once(message: str) -> None:
    """Log a line once per process, on the last rank.

    In every rank order, the last rank is on the last pipeline stage, which has the head.
    """
    alone = not (dist.is_available() and dist.is_initialized())
    if message not in _logged and (alone or dist.get_rank() == dist.get_world_size() - 1):
        _LOG.warning(message)
    _logged.add(message)


def counting_tokens(loss_mask: Tensor, count: int) -> Tensor:
    """Attach the number of tokens that count, which the host knows, to a mask on the device.

    Args:
        loss_mask: any shape, on any device.
        count: an upper bound of its non-zero elements.

    Returns:
        The same tensor. Tensors derived from it, including views, do not carry the number.
    """
    setattr(loss_mask, _COUNT, count)
    return loss_mask


def counted_tokens(loss_mask: Tensor) -> int | None:
    """Return the number that `counting_tokens` attached; None if there is none."""
    count: int | None = getattr(loss_mask, _COUNT, None)
    return count


def _graph_break(function: _Function) -> _Function:
    """`torch.compiler.disable`, with types."""
    return cast(_Function, torch.compiler.disable(function))


@_graph_break
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    loss_weights: Tensor | None = None,
    upstream: Upstream = "arbitrary",
    counted_tokens: int | None = None,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    hidden_grad: HiddenGrad = "reduced",
    gradient_accumulation_fusion: bool = False,
    return_argmax: bool = False,
    backend: str | None = None,
    chunk_tokens: int | None = None,
    caller: str = "linear_cross_entropy",
) -> LinearCrossEntropyOutput:
    """Compute the cross-entropy per token of `logit_scale * hidden @ weight.T` against `targets`.

    Under torch.compile this is a graph break. Under no_grad only the loss is computed.

    Args:
        hidden: `[..., H]`, the same on all ranks of `tp_group` (a caller with sequence parallelism
            gathers it first); bf16, fp16, fp32, and fp64 on the reference backend.
        weight: `[V/tp, H]`, same type: this rank's rows of the output matrix, rank r holding the
            token ids from `r * V/tp` on.
        targets: shape of hidden without its last dimension, integer, global token ids.
        loss_weights: shape of targets: what the upstream gradient will be up to one scalar, such as
            the loss mask. Only with "weighted-scalar"; None means all ones. Their gradient is not
            computed.
        upstream: "weighted-scalar" guarantees that the gradient of `loss` is
            `scalar * loss_weights` (rows with an ignored target may have any): three GEMMs.
            "arbitrary" guarantees nothing: four.
        counted_tokens: an upper bound of the tokens that count (a weight that is not 0, a target
            that is not ignored), known on the host. Only they are computed; the loss of the
            others is 0, their arg-max -1. Only with "weighted-scalar"; None computes every token.
            Not for a CUDA graph, whose shapes are fixed.
        vocab_size: the true vocabulary; columns from there on are excluded from the softmax and the
            argmax and get no gradient. None counts every column, as Megatron does.
        ignore_index: target of rows that have no loss.
        logit_scale: factor on the logits (MuP).
        tp_group: group over which the vocabulary is split. Per chunk, one all-gather of four
            numbers per token.
        hidden_grad: "reduced" sums dX over `tp_group` in the backward, in the type of hidden.
            "partial" returns this rank's part, for a caller whose own backward sums it: the
            reduce-scatter of a sequence-parallel gather. dW needs no reduction over `tp_group`.
        gradient_accumulation_fusion: add dW to `weight.main_grad` in the backward, and set
            `weight.grad_added_to_main_grad`, as Megatron's linear layers do.
        return_argmax: return the arg-max token as well.
        backend: a name from `BACKENDS` or "auto"; None reads `CPPMEGA_LINEAR_CE_KERNEL`.
        chunk_tokens: tokens per chunk; None uses as many as fit in 1 GiB of logits.
        caller: named in the message if the guarantee does not hold, such as the name of a patch.

    Returns:
        See `LinearCrossEntropyOutput`.

    Raises:
        CppmegaError: shapes, types or arguments are inconsistent, or the backend does not support
            the call.
        RuntimeError: on the CPU at once, on CUDA as a device-side assertion: a target outside
            `[0, vocab_size)` on a row that counts, more rows that count than `counted_tokens`, or
            an upstream gradient that violates the guarantee.
    """
    ranks = tp_group.size() if tp_group is not None else 1
    padded_vocabulary = weight.shape[0] * ranks
    vocabulary = padded_vocabulary if vocab_size is None else vocab_size
    _check(
        hidden, weight, targets, loss_weights, upstream, hidden_grad, vocabulary, padded_vocabulary
    )
    if counted_tokens is not None and (upstream == "arbitrary" or counted_tokens < 0):
        raise _wrong_arguments(f"counted_tokens={counted_tokens} with upstream={upstream!r}")
    name, _ = select_backend(backend, hidden.device, hidden.dtype)
    shape = targets.shape
    rows = hidden.reshape(targets.numel(), hidden.shape[-1]).contiguous()
    flat_targets = targets.reshape(-1).long()
    ignored = flat_targets == ignore_index
    counts = ~ignored
    if loss_weights is not None:
        counts &= loss_weights.reshape(-1) != 0
    known = (flat_targets >= 0) & (flat_targets < vocabulary)
    torch._assert_async(
        (known | ~counts).all(),
        f"{caller}: a target is outside [0, {vocabulary}) and is not the ignored one, "
        f"{ignore_index}",
    )
    main_grad = None
    if gradient_accumulation_fusion and weight.requires_grad and torch.is_grad_enabled():
        main_grad = main_grad_of(weight)

    if name == "liger":
        request = external.Request(
            tensor_parallel=ranks > 1,
            padded=vocabulary != padded_vocabulary,
            logit_scale=logit_scale,
            want_argmax=return_argmax,
            main_grad=main_grad is not None,
            ignore_index=ignore_index,
        )
        with on_device_of(rows):  # it launches on the current device
            loss, predicted = external.liger(rows, weight, flat_targets, request)
        argmax = predicted.view(shape) if return_argmax else None
        return LinearCrossEntropyOutput(loss.view(shape), argmax, name)

    first_column = tp_group.rank() * weight.shape[0] if tp_group is not None else 0
    order = None if counted_tokens is None else _counted_rows(counts, counted_tokens, caller)
    computed = rows.shape[0] if order is None else order.shape[0]
    problem = Problem(
        targets=flat_targets,
        columns=min(max(vocabulary - first_column, 0), weight.shape[0]),
        first_column=first_column,
        ignored=ignored,
        order=order,
        logit_scale=logit_scale,
        tp_group=tp_group if ranks > 1 else None,
        chunk_tokens=chunk_tokens
        or default_chunk_tokens(computed, weight.shape[0], hidden.element_size()),
        want_argmax=return_argmax,
        kernels=_kernels(name),
    )
    reduced = hidden_grad == "reduced"
    if not (torch.is_grad_enabled() and (rows.requires_grad or weight.requires_grad)):
        done = walk(problem, rows, weight)
        loss, found = cast(Tensor, done.loss), done.argmax
    elif upstream == "weighted-scalar":
        counted = _counted_weights(loss_weights, ignored, problem.kernels, hidden.dtype)
        if _keeps_logits(main_grad, problem.kernels, computed, hidden):
            loss, found = InBackward.apply(
                rows, weight, problem, reduced, main_grad, counted, caller
            )
        else:
            loss, found = DeferredScalar.apply(
                rows, weight, problem, counted, reduced, main_grad, caller
            )
    else:
        loss, found = InBackward.apply(rows, weight, problem, reduced, main_grad, None, caller)
    return LinearCrossEntropyOutput(
        loss.view(shape), found.view(shape) if found is not None else None, name
    )


def _kernels(name: str) -> ChunkKernels:
    if name == "reference":
        return reference
    from cppmega.ops.linear_cross_entropy import kernels_triton as triton_kernels

    return triton_kernels


def _keeps_logits(
    main_grad: MainGrad | None, kernels: ChunkKernels, computed: int, hidden: Tensor
) -> bool:
    """Whether dW is added to `main_grad`, and the logits are smaller than dW in its wide type.

    Without `main_grad`, a backward that holds the logits would have to hold dW beside them.
    """
    logits = computed * kernels.logits_buffer(0, 1, hidden).element_size()
    weight_grad = hidden.shape[-1] * kernels.accumulation_dtype(hidden.dtype).itemsize
    return main_grad is not None and logits <= weight_grad


_ROW_TILE = 128
"""The number of computed rows is rounded up to complete tiles of the GEMM kernels."""


def _counted_rows(counts: Tensor, most: int, caller: str) -> Tensor:
    """`[R]` int64: the rows that count, in order, padded to complete tiles with other rows."""
    torch._assert_async(
        counts.sum() <= most,
        f"{caller}: more tokens count than counted_tokens={most}; the others would have no loss",
    )
    computed = min(-(-most // _ROW_TILE) * _ROW_TILE, counts.shape[0])
    return counts.to(torch.uint8).argsort(descending=True, stable=True)[:computed]


def _counted_weights(
    loss_weights: Tensor | None, ignored: Tensor, kernels: ChunkKernels, dtype: torch.dtype
) -> Tensor:
    """`[N]`: the guaranteed weights, 0 on rows whose loss is constant."""
    wide = kernels.accumulation_dtype(dtype)
    if loss_weights is None:
        return (~ignored).to(wide)
    return loss_weights.detach().reshape(-1).to(wide).masked_fill(ignored, 0)


def _check(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    loss_weights: Tensor | None,
    upstream: str,
    hidden_grad: str,
    vocabulary: int,
    padded_vocabulary: int,
) -> None:
    shapes: dict[str, Any] = {
        "hidden": list(hidden.shape),
        "weight": list(weight.shape),
        "targets": list(targets.shape),
        "loss_weights": None if loss_weights is None else list(loss_weights.shape),
    }
    problems = {
        "weight is not [V/tp, H] with the H of hidden": weight.dim() != 2
        or hidden.shape[-1] != weight.shape[-1],
        "targets are not shaped like hidden without H": targets.shape != hidden.shape[:-1],
        "loss_weights are not shaped like targets": loss_weights is not None
        and loss_weights.shape != targets.shape,
        f"hidden is {hidden.dtype} and weight {weight.dtype}": hidden.dtype != weight.dtype,
        f"targets are {targets.dtype}": targets.is_floating_point(),
        f"{hidden.dtype} is not supported": hidden.dtype
        not in (torch.bfloat16, torch.float16, torch.float32, torch.float64),
        f"vocab_size {vocabulary} is not in 1..{padded_vocabulary}": not (
            0 < vocabulary <= padded_vocabulary
        ),
        f"upstream is {upstream!r}": upstream not in ("weighted-scalar", "arbitrary"),
        f"hidden_grad is {hidden_grad!r}": hidden_grad not in ("reduced", "partial"),
        'loss_weights without upstream="weighted-scalar"': loss_weights is not None
        and upstream == "arbitrary",
    }
    wrong = [what for what, is_so in problems.items() if is_so]
    if wrong:
        raise _wrong_arguments(f"{'; '.join(wrong)} (shapes {shapes})")


def _wrong_arguments(what: str) -> CppmegaError:
    return CppmegaError(
        "linear-ce-arguments",
        f"{what}.",
        "The loss would not be the intended one.",
        "see the docstring of cppmega.ops.linear_cross_entropy.linear_cross_entropy",
    )
