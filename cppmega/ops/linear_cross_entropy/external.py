"""Linear cross-entropy with Liger-Kernel.

It runs its own autograd, with the true upstream gradient per token and a recomputation of the
logits in the backward (four GEMMs), so `upstream="weighted-scalar"` has no effect on it. What it
does not support is rejected by name; nothing is approximated, and there is no fallback. It waits
for the device once per call (`.item()`), so that it cannot be captured in a CUDA graph.
"""

from __future__ import annotations

import importlib.metadata
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
    _refuse(hidden, want)
    _require_installed()
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


def _require_installed() -> None:
    try:
        version = importlib.metadata.version("liger-kernel")
    except importlib.metadata.PackageNotFoundError:
        version = None
    if version is None or Version(version) < Version(LIGER_MINIMUM):
        raise CppmegaError(
            "linear-ce-backend",
            f"Backend liger was requested; liger-kernel is {version or 'not installed'}, "
            f"{LIGER_MINIMUM} or later is needed.",
            "Other backends differ in rounding and speed, and are not selected silently.",
            f"pip install 'liger-kernel>={LIGER_MINIMUM}', or set CPPMEGA_LINEAR_CE_KERNEL=triton",
        )


def _refuse(hidden: Tensor, want: Request) -> None:
    cannot = {
        f"tensors on {hidden.device.type}": hidden.device.type != "cuda",
        f"{hidden.dtype}": hidden.dtype not in (torch.bfloat16, torch.float16, torch.float32),
        "a vocabulary split over ranks": want.tensor_parallel,
        "vocabulary padding": want.padded,
        "a logit scale": want.logit_scale != 1.0,
        "gradient_accumulation_fusion": want.main_grad,
    }
    refused = [what for what, is_wanted in cannot.items() if is_wanted]
    if refused:
        raise CppmegaError(
            "linear-ce-backend",
            f"Backend liger was requested and does not support: {', '.join(refused)}.",
            "Leaving any of it out would silently change the loss or the gradient.",
            "unset CPPMEGA_LINEAR_CE_KERNEL (auto), or set it to triton",
        )
