"""Checks of the attention with a key per head, for the interpreter and for a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cppmega.ops.common.bounds import Bounds, RowBounds
from cppmega.ops.dsa_attention import bits_triton as bits
from cppmega.ops.dsa_attention import naive as reference
from cppmega.ops.dsa_attention import per_head
from cppmega.ops.dsa_attention import per_head_tiles as tiles
from cppmega.ops.dsa_attention import per_head_triton as kernels
from tests.ops.dsa_indexer.checks import relative
from tests.ops.dsa_indexer.test_dsa_indexer import documents

__all__ = [
    "Bounds", "Shape", "check", "check_errors", "check_lists", "check_nothing", "check_parts",
    "check_places", "choices", "documents", "drawn", "gradients", "small_tiles",
]  # fmt: skip

SMALL = tiles.Tile(32, 32, 4, 1)


class Shape(NamedTuple):
    """A call's sizes."""

    sq: int
    sk: int
    batch: int
    heads: int
    key_heads: int
    value_heads: int
    width: int
    value_width: int
    topk: int


def small_tiles() -> None:
    """Several tiles for few rows, and parts of as few."""
    bits.WHOLE = per_head.WHOLE = 64
    kernels.tiles_for = lambda *widths: tiles.Tiles(SMALL, SMALL, SMALL)


def drawn(shape: Shape, *, std: float = 1.0, fused: bool = True, **how: Any) -> tuple[Tensor, ...]:
    """Query, key and value, and an upstream gradient; scores of about this standard deviation.

    Args:
        shape: the sizes.
        std: of the scores, with a scale of the inverse square root of the width.
        fused: key and value are views of one projection, if they have as many heads.
        how: device and type.
    """
    normal = torch.Generator(device=how.get("device", "cpu")).manual_seed(7)
    dtype = how.pop("dtype", torch.float32)

    def normals(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=normal, **how)

    sq, sk, b, heads, width, v = *shape[:4], shape.width, shape.value_width
    query, upstream = normals(sq, b, heads, width), normals(sq, b, heads, v)
    both = normals(sk, b, max(shape.key_heads, shape.value_heads), width + v)
    key, value = both[..., :width], both[..., width:]
    if not fused or shape.key_heads != shape.value_heads:
        key, value = key[:, :, : shape.key_heads], value[:, :, : shape.value_heads]
    else:
        key, value = both.to(dtype).split([width, v], -1)
    upstream = upstream * torch.linspace(0.1, 3.0, sq, device=upstream.device)[:, None, None, None]
    return tuple(x.to(dtype) for x in (query * std, key, value, upstream))


def choices(shape: Shape, device: str = "cpu") -> Tensor:
    """Keys at random: -1 and what is out of bounds anywhere, a sink, and a row without keys."""
    normal = torch.Generator().manual_seed(3)
    chances = torch.rand(shape.batch, shape.sq, shape.sk, generator=normal)
    found = chances.argsort(-1)[..., : shape.topk] + 0
    found[..., shape.topk // 2] = 0
    found[..., shape.topk // 3] = torch.where(torch.arange(shape.sq) % 3 == 0, -1, shape.sk + 5)
    found[:, shape.sq // 2] = -1
    return found.to(device)


def once(indices: Tensor) -> Tensor:
    """The indices of each row, ascending, -1 for what is repeated: what the reference takes."""
    ordered = indices.sort(-1).values
    again = torch.zeros_like(ordered, dtype=torch.bool)
    again[..., 1:] = ordered[..., 1:] == ordered[..., :-1]
    return ordered.masked_fill(again, -1)


def truth(
    tensors: tuple[Tensor, ...], indices: Tensor, scale: float, bounds: Bounds
) -> list[Tensor]:
    """Output and gradients of plain torch, in the precision of the tensors."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors[:3]]
    indices = once(indices)
    seen = reference.visible(indices, leaves[1].size(0), *bounds)
    out = reference.attention(*leaves, indices, seen, scale)
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]


def gradients(
    tensors: tuple[Tensor, ...], indices: Tensor, scale: float, bounds: Bounds
) -> list[Tensor]:
    """Output and gradients of the kernels."""
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    out = per_head.per_head(*leaves, indices, scale, *bounds)
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]


def check(
    shape: Shape,
    bounds: Bounds,
    *,
    std: float = 1.0,
    repeats: bool = False,
    dtype: torch.dtype = torch.int64,
) -> None:
    """Output and gradients of fp32 inputs against the plain path in fp64.

    Args:
        shape: the sizes.
        bounds: what a query may see.
        std: of the scores.
        repeats: a second call gives the same bits.
        dtype: of the indices.
    """
    made = drawn(shape, std=std)
    chosen, scale = choices(shape).to(dtype), shape.width**-0.5
    found = gradients(made, chosen, scale, bounds)
    true = truth(tuple(x.double() for x in made), chosen, scale, bounds)
    for mine, theirs, like in zip(found, true, (made[3], *made[:3]), strict=True):
        assert mine.shape == like.shape and mine.dtype == like.dtype
        assert relative(mine, theirs) < 5e-6 * max(1.0, std / 4), (shape, std)
    with torch.no_grad():
        out = per_head.per_head(*made[:3], chosen, scale, *bounds)
    assert torch.equal(out, found[0])
    if repeats:
        assert all(map(torch.equal, found, gradients(made, chosen, scale, bounds)))


def check_nothing(shape: Shape, bounds: Bounds) -> None:
    """Queries that see no key: an output and gradients of 0."""
    made = drawn(shape)
    indices = torch.full((shape.batch, shape.sq, shape.topk), -1)
    for found, like in zip(gradients(made, indices, 1.0, bounds), made[-1:] + made, strict=False):
        assert found.shape == like.shape and not found.any()


def check_parts(shape: Shape, bounds: Bounds, **how: Any) -> None:
    """The same bits whether all queries are one part or several."""
    made, indices = drawn(shape, **how), choices(shape, how.get("device", "cpu"))
    one = gradients(made, indices, 0.3, bounds)
    whole, per_head.BITS_BYTES = per_head.BITS_BYTES, 1
    assert len(per_head._parts(shape.sq, shape.sk, shape.batch)) > 1
    assert all(map(torch.equal, one, gradients(made, indices, 0.3, bounds)))
    per_head.BITS_BYTES = whole


def check_places(shape: Shape, **how: Any) -> None:
    """The same bits for a sequence alone."""
    made, indices = drawn(shape, **how), choices(shape, how.get("device", "cpu"))
    found = gradients(made, indices, 0.3, Bounds())
    for at in range(shape.batch):
        alone = tuple(x[:, at : at + 1] for x in made)
        one = gradients(alone, indices[at : at + 1], 0.3, Bounds())
        assert all(torch.equal(x[:, at : at + 1], y) for x, y in zip(found, one, strict=True))


def check_lists(shape: Shape) -> None:
    """The bits are what the queries chose, the lists exactly the tiles that have one."""
    row = torch.arange(shape.sq)
    near = torch.stack([row - 1, row, row % 3, row + 2], -1).repeat(shape.batch, 1, 1)
    near[1, 32:64] = -1
    causal = RowBounds.of(None, None, shape.batch, shape.sq, near)
    made = bits.Bits(near, shape.sk, (0, shape.sq), causal, across=True)
    seen = reference.visible(near, shape.sk, None, None)
    chosen = torch.zeros(shape.batch, made.rows, made.columns, dtype=torch.bool)
    b, q, slot = seen.nonzero(as_tuple=True)
    chosen[b, q, near[b, q, slot]] = True
    for of_keys, words in ((False, made.by_query), (True, made.by_key)):
        mask = chosen.mT if of_keys else chosen
        word = words.view(*mask.shape[:2], -1, 1) >> torch.arange(32)
        assert torch.equal((word & 1).bool().flatten(2), mask)
        found = made.lists(32, 64, of_keys=of_keys)
        want = mask.unflatten(2, (-1, 64)).unflatten(1, (-1, 32)).any(4).any(2)
        assert 0 < want.sum() < want.numel()
        assert torch.equal(found.counts.flatten().long(), want.sum(-1).flatten())
        rows = (found.tiles.flatten(0, 1), found.counts.flatten(), want.flatten(0, 1))
        for listed, count, there in zip(*rows, strict=True):
            assert listed[:count].tolist() == there.nonzero().flatten().tolist()


def check_errors(
    shape: Shape,
    bounds: Bounds,
    *,
    std: float,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
) -> None:
    """Errors against fp64 at most 1.5 times those of fp32 rounded to the type."""
    made = drawn(shape, std=std, dtype=dtype, device=device)
    indices, scale = choices(shape, device), shape.width**-0.5
    found = gradients(made, indices, scale, bounds)
    floor = truth(tuple(x.float() for x in made), indices, scale, bounds)
    true = truth(tuple(x.double() for x in made), indices, scale, bounds)
    for mine, low, exact in zip(found, floor, true, strict=True):
        assert mine.dtype == dtype
        ratio = relative(mine, exact) / relative(low.to(dtype), exact)
        assert ratio < 1.5, (shape, std, ratio)
