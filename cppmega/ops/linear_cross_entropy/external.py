"""Linear cross-entropy with third-party libraries: Liger-Kernel and Apple's cut-cross-entropy.

Both run their own autograd, with the true upstream gradient per token and a recomputation of the
logits in the backward (four GEMMs), so `upstream="weighted-scalar"` has no effect on them. What
they do not support is rejected by name; nothing is approximated, and there is no fallback.

Their own limits: Liger waits for the device once per call (`.item()`), so it cannot be
captured in a CUDA graph; cut-cross-entropy sums gradients under locks in an order that changes
from run to run.
"""

from __future__ import annotations

import importlib.metadata
import inspect
from typing import NamedTuple

import torch
from packaging.version import Version
from torch import Tensor

from cppmega.errors import CppmegaError

LIGER_MINIMUM = "0.8.5"
"""Earlier versions scaled every row by the first upstream gradient with reduction="none"
(Liger #968)."""


class Request(NamedTuple):
    """The request of a caller besides hidden, weight and targets.

    Attributes:
        tensor_parallel: the vocabulary is split over more than one rank.
        padded: the weight has rows beyond the true vocabulary.
        logit_scale: factor on the logits.
        want_argmax: the arg-max token is requested.
        main_grad: dW goes into `weight.main_grad`.
        ignore_index: target without a loss.
    """

    tensor_parallel: bool
    padded: bool
    logit_scale: float
    want_argmax: bool
    main_grad: bool
    ignore_index: int


def liger(hidden: Tensor, weight: Tensor, targets: Tensor, want: Request) -> tuple[Tensor, Tensor]:
    """Liger's FusedLinearCrossEntropy, per token, dW accumulated in fp32.

    Args:
        hidden: `[N, H]` on CUDA.
        weight: `[V, H]`, same type.
        targets: `[N]` int64.
        want: see `Request`; only the plain case and the arg-max are supported.

    Returns:
        Loss `[N]` fp32 and argmax `[N]` int64 (-1 where ignored; empty unless wanted).

    Raises:
        CppmegaError: it is not installed, is older than 0.8.5, returns another number of results,
            or does not support the device or the request.

    Source: liger-kernel 0.8.5, `liger_kernel/ops/fused_linear_cross_entropy.py`, pull request 1298.
    """
    _refuse("liger", hidden, want, argmax=True)
    _installed("liger", "liger-kernel", LIGER_MINIMUM)
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    returned = LigerFusedLinearCrossEntropyFunction.apply(
        hidden,
        weight,
        targets,
        None,  # bias
        None,  # ce_weight
        want.ignore_index,
        0.0,  # lse_square_scale
        0.0,  # label_smoothing
        "none",
        None,  # softcap
        False,  # return_z_loss
        torch.float32,  # accum_dtype; its default would be the type of the weight
        False,  # use_token_scaling
        False,  # return_token_accuracy
        want.want_argmax,
    )
    if not isinstance(returned, tuple) or len(returned) != 4:
        got = len(returned) if isinstance(returned, tuple) else type(returned).__name__
        raise CppmegaError(
            "linear-ce-backend",
            f"Liger's fused linear cross-entropy returned {got} instead of 4 values.",
            "Its interface changed, and training on the wrong value would train on noise.",
            "install liger-kernel 0.8.5, or set CPPMEGA_LINEAR_CE_KERNEL=triton",
        )
    loss, _, _, predicted = returned
    return loss, predicted if want.want_argmax else targets.new_empty(0)


def cce(hidden: Tensor, weight: Tensor, targets: Tensor, want: Request) -> tuple[Tensor, Tensor]:
    """Apple's cut-cross-entropy, per token, with the gradient filter off.

    Its default drops gradients below a threshold, which biases dW.

    Arguments and results are those of `liger`; bf16 and fp16 only, and no argmax.

    Raises:
        CppmegaError: it is not installed, has no `filter_eps` to switch off, or does not support
            the device or the request.

    Source: cut-cross-entropy 25.1.1, `cut_cross_entropy/linear_cross_entropy.py`.
    """
    _refuse("cce", hidden, want, argmax=False)
    _installed("cce", "cut-cross-entropy", "25.1.1")
    from cut_cross_entropy import linear_cross_entropy

    if "filter_eps" not in inspect.signature(linear_cross_entropy).parameters:
        raise CppmegaError(
            "linear-ce-backend",
            "cut_cross_entropy.linear_cross_entropy has no argument filter_eps.",
            "The gradient filter could not be switched off: small gradients would be dropped.",
            "install cut-cross-entropy 25.1.1, or set CPPMEGA_LINEAR_CE_KERNEL=triton",
        )
    loss: Tensor = linear_cross_entropy(
        hidden,
        weight,
        targets,
        ignore_index=want.ignore_index,
        reduction="none",
        filter_eps=None,
        impl="cce",
    )
    return loss.float(), targets.new_empty(0)


def _installed(backend: str, package: str, minimum: str) -> None:
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        version = None
    if version is None or Version(version) < Version(minimum):
        raise CppmegaError(
            "linear-ce-backend",
            f"Backend {backend} was requested; {package} is {version or 'not installed'}, "
            f"{minimum} or later is needed.",
            "Other backends differ in rounding and speed, and are not selected silently.",
            f"pip install '{package}>={minimum}', or set CPPMEGA_LINEAR_CE_KERNEL=triton",
        )


def _refuse(backend: str, hidden: Tensor, want: Request, argmax: bool) -> None:
    types = {
        "liger": (torch.bfloat16, torch.float16, torch.float32),
        "cce": (torch.bfloat16, torch.float16),
    }[backend]
    cannot = {
        f"tensors on {hidden.device.type}": hidden.device.type != "cuda",
        f"{hidden.dtype}": hidden.dtype not in types,
        "a vocabulary split over ranks": want.tensor_parallel,
        "vocabulary padding": want.padded,
        "a logit scale": want.logit_scale != 1.0,
        "gradient_accumulation_fusion": want.main_grad,
        "the arg-max token": want.want_argmax and not argmax,
    }
    refused = [what for what, is_wanted in cannot.items() if is_wanted]
    if refused:
        raise CppmegaError(
            "linear-ce-backend",
            f"Backend {backend} was requested and does not support: {', '.join(refused)}.",
            "Leaving any of it out would silently change the loss or the gradient.",
            "unset CPPMEGA_LINEAR_CE_KERNEL (auto), or set it to triton",
        )
