"""Error bounds of Mamba-3's kernels."""

from __future__ import annotations

from typing import Any

import torch

from cppmega.ops.mamba3.autograd import mixed
from cppmega.ops.mamba3.naive import Inputs
from tests.ops.mamba3.checks import Shape
from tests.ops.mamba3.errors import Mix, by_kernels, errors, given_for


def check(shape: Shape, dtype: torch.dtype, *args: Any, mix: Mix = mixed, **kwargs: Any) -> None:
    """Compare with plain torch; the arguments are those of `mamba3_errors.errors`.

    An error is at most 1.5 times that of plain torch with matrix products in the type of the
    inputs, or that of one rounding to this type, which matters for gradients with few elements.
    With inputs in fp32, where nothing is rounded to a narrower type, it is at most 1e-5 of the
    result.
    """
    narrow = dtype != torch.float32
    found = errors(mix, shape, dtype, *args, **kwargs, products=dtype if narrow else None)
    for name, error in found.items():
        floor = max(error.plain, error.size * torch.finfo(dtype).eps / 2)
        most = 1.5 * floor if narrow else 1e-5 * error.size
        assert error.ours <= most, f"{name} of {shape}, {dtype}: {error}, at most {most:.2e}"


def check_layouts(shape: Shape) -> None:
    """Inputs and upstream gradients of any layout give the same bits."""
    inputs, parameters = given_for(shape, torch.float32)
    others = (each.detach().transpose(-1, -2).contiguous().transpose(-1, -2) for each in inputs)
    turned = Inputs(*(each.requires_grad_() for each in others))
    assert not any(each.stride(-1) == 1 for each in turned)
    upstream = torch.randn(1, *inputs.x.shape)
    want = by_kernels(mixed, inputs, parameters, upstream, "softplus", None)
    upstream = upstream.transpose(2, 3).contiguous().transpose(2, 3)
    found = by_kernels(mixed, turned, parameters, upstream, "softplus", None)
    different = [name for name, each in want.items() if not torch.equal(found[name], each)]
    assert not different, different
