"""Checks of the absorbed sparse attention, for the interpreter and for a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cppmega.ops.common.bounds import Bounds
from cppmega.ops.dsa_attention import backward_triton as backward
from cppmega.ops.dsa_attention import forward_triton as forward
from cppmega.ops.dsa_attention import naive as reference
from cppmega.ops.dsa_attention.autograd import absorbed
from cppmega.ops.dsa_attention.problem import Absorbed
from tests.ops.dsa_indexer.checks import documents, relative

__all__ = ["Bounds", "Shape", "check", "check_errors", "documents", "drawn", "gradients"]


class Shape(NamedTuple):
    """A call's sizes; a key is a latent part, which is the value too, and a rotary part."""

    sq: int
    sk: int
    batch: int
    heads: int
    latent: int
    rotary: int
    topk: int


class Drawn(NamedTuple):
    """A call's tensors."""

    query: Tensor
    key: Tensor
    upstream: Tensor
    indices: Tensor
    scale: float


def drawn(shape: Shape, *, std: float = 1.0, dtype: Any = torch.float32, **how: Any) -> Drawn:
    """Query, key, gradient of the output, indices and scale; scores of about this deviation.

    Gradients of rows differ by a factor of 100. Of each row's entries a fifth is -1, all of the
    second row's, and all but one of the third's; key 0 is chosen by every other query.
    """
    made = torch.Generator(device=how.get("device", "cpu")).manual_seed(7)
    width = shape.latent + shape.rotary

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=made, **how)

    query = normal(shape.sq, shape.batch, shape.heads, width) * std
    key = normal(shape.sk, shape.batch, 1, width)
    rows = torch.logspace(-1, 1, shape.sq, **how)[:, None, None, None]
    upstream = normal(shape.sq, shape.batch, shape.heads, shape.latent) * rows
    chances = torch.rand(shape.batch, shape.sq, shape.sk, generator=made, **how)
    chances[:, ::2, 0] = 2.0
    if shape.sq == shape.sk:  # a key that a query may not see would only thin the row out
        chances = chances.tril_()
    indices = chances.topk(shape.topk).indices
    dropped = torch.rand(indices.shape, generator=made, **how) < 0.2
    indices = indices.masked_fill(dropped, -1)
    indices[:, 1] = -1
    indices[:, 2, 1:] = -1
    return Drawn(*(x.to(dtype) for x in (query, key, upstream)), indices.int(), width**-0.5)


def gradients(shape: Shape, given: Drawn, bounds: Bounds, repeatable: bool) -> list[Tensor]:
    """The kernels' output, and gradients of queries and keys."""
    query, key = given.query.detach().requires_grad_(), given.key.detach().requires_grad_()
    call = Absorbed(query, key, shape.latent, given.indices, given.scale, *bounds)
    out = absorbed(call, repeatable=repeatable)
    return [out.detach(), *torch.autograd.grad(out, (query, key), given.upstream)]


def expected(
    shape: Shape, given: Drawn, bounds: Bounds, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """The same of the reference, a batch element at a time."""
    found: list[list[Tensor]] = []
    for b in range(shape.batch):
        one = slice(b, b + 1)
        query = given.query[:, one].detach().to(dtype).requires_grad_()
        key = given.key[:, one].detach().to(dtype).requires_grad_()
        bound = [x if x is None or x.ndim == 1 else x[one] for x in bounds]
        seen = reference.visible(given.indices[one], shape.sk, *bound)
        value = key[..., : shape.latent]
        out = reference.attention(query, key, value, given.indices[one], seen, given.scale)
        upstream = given.upstream[:, one].to(dtype)
        found.append([out.detach(), *torch.autograd.grad(out, (query, key), upstream)])
    return [torch.cat(parts, 1) for parts in zip(*found, strict=True)]


def check(shape: Shape, bounds: Bounds, *, scratch: int | None = None, std: float = 1.0) -> None:
    """fp32 inputs in small blocks against fp64, gradients of keys summed in both ways."""
    small = forward.Tiles(keys=16, heads=16, stages=1)
    forward.tiles_of = backward.tiles_of = lambda *of: small
    backward.SCRATCH_BYTES = scratch or backward.SCRATCH_BYTES
    given = drawn(shape, std=std)
    want = expected(shape, given, bounds)
    for repeatable in (False, True):
        for mine, true in zip(gradients(shape, given, bounds, repeatable), want, strict=True):
            assert relative(mine, true) < 1e-6 * std, (shape, repeatable)


def check_errors(shape: Shape, bounds: Bounds, *, std: float, dtype: torch.dtype) -> None:
    """Errors against fp64 at most 1.5 times those of fp32 rounded to the type of the inputs."""
    given = drawn(shape, std=std, dtype=dtype, device="cuda")
    true = expected(shape, given, bounds)
    floor = expected(shape, given, bounds, torch.float32)
    for repeatable in (False, True):
        found = gradients(shape, given, bounds, repeatable)
        for name, mine, low, exact in zip(("out", "dq", "dkv"), found, floor, true, strict=True):
            assert mine.dtype == dtype
            assert relative(mine, exact) <= 1.5 * relative(low.to(dtype), exact), (
                name,
                repeatable,
                relative(mine, exact) / relative(low.to(dtype), exact),
            )
