"""The gradients of a router's scores, in torch."""

from __future__ import annotations

import torch
from torch import Tensor


def gradients(inp: Tensor, weight: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of what `inp @ weight.T` is computed from, in the precision of `given`.

    Args:
        inp: `[tokens, hidden]`.
        weight: `[experts, hidden]`.
        given: fp32 or fp64 `[tokens, experts]`, the gradient of the scores.

    Returns:
        Those of `inp` and `weight`, each rounded once to its type.
    """
    wide = given.dtype
    of_inp = torch.mm(given, weight.to(wide)).to(inp.dtype)
    return of_inp, torch.mm(given.t(), inp.to(wide)).to(weight.dtype)
