"""Checks of the indexer's kernels, for the interpreter and for a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cppmega.ops.common.bounds import Bounds
from cppmega.ops.dsa_indexer import autograd, indexer_loss
from cppmega.ops.dsa_indexer import dense_triton as dense
from cppmega.ops.dsa_indexer import naive as reference
from cppmega.ops.dsa_indexer import per_head_triton as per_head
from cppmega.ops.dsa_indexer import tiles_triton as tiles
from cppmega.ops.dsa_indexer import topk_triton as topk_kernels
from cppmega.ops.dsa_indexer.problem import Loss
from tests.ops.dsa_indexer.test_dsa_indexer import documents, inputs, rows_that_count

__all__ = [
    "Bounds", "check_choice", "check_errors", "check_loss", "check_plateaus", "check_target",
    "documents",
]  # fmt: skip

SMALL = topk_kernels.Launch(columns=16, keys=16, chunk=16, programs=1)


def relative(found: Tensor, true: Tensor) -> float:
    """Relative L2 error; NaN never passes."""
    assert torch.isfinite(found).all()
    return float((found.double() - true.double()).norm() / true.double().norm().clamp_min(1e-30))


def check_choice(
    sq: int,
    batch: int,
    heads: int,
    width: int,
    topk: int,
    bounds: Bounds,
    dtype: torch.dtype,
    *,
    integers: bool,
    device: str = "cpu",
) -> None:
    """Choice, chosen scores and log-sum-exp; of integers, which tie, and have exact sums."""
    made = inputs(sq, batch, heads, width, (1, 1, 16), dtype=torch.float32, device=device)
    q, k, w = made[:3]
    if integers:
        q, k, w = q.round(), k.round(), (w * 8).round()
    q, k, w = (x.to(dtype) for x in (q, k, w))
    launch = SMALL if device == "cpu" else None
    starts, ends = bounds
    indices, chosen, lse = topk_kernels.choose(
        q, k, w, min(topk, sq), starts=starts, ends=ends, use_relu=True,
        want_scores=True, want_lse=True, launch=launch,
    )  # fmt: skip
    valid = reference.valid_keys(sq, sq, batch, *bounds, q.device)
    scores = reference.scores(q, k, w, valid, True)
    assert torch.equal(indices, reference.choose(scores, topk))
    at = scores.gather(-1, indices.clamp(min=0).long()).masked_fill(indices < 0, -torch.inf)
    torch.testing.assert_close(chosen, at, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-5, atol=1e-5)


def check_plateaus() -> None:
    """One head with a weight of one and queries of one: the scores are the keys as they are."""
    rows = torch.zeros(7, 20)
    rows[1, ::3] = -0.0
    rows[2, 4:] = -1.0
    rows[3, 5:9] = 2.0
    rows[4] = -3.0
    rows[5] = torch.arange(20) % 3 * 1e-38
    rows[6] = torch.linspace(-1e30, 1e30, 20)
    for row in rows:
        k = torch.zeros(20, 1, 16)
        k[:, 0, 0] = row
        q = torch.zeros(1, 1, 1, 16)
        q[..., 0] = 1
        for topk in (1, 7):
            found = topk_kernels.choose(
                q, k, torch.ones(1, 1, 1), topk, starts=None, ends=None, use_relu=False,
                launch=SMALL,
            )[0]  # fmt: skip
            assert torch.equal(found[0], reference.choose(row[None], topk)), (row, topk)


def check_loss(
    sparse: bool,
    sq: int,
    batch: int,
    heads: int,
    width: int,
    attention: tuple[int, int, int],
    bounds: Bounds,
    *,
    tile: int,
    inside_logs: bool = False,
    use_relu: bool = True,
    part_bytes: int | None = None,
    repeatable: bool = False,
    rows: bool | Tensor = True,
    std: float = 1.0,
) -> None:
    """Loss and gradients of fp32 inputs against the plain path in fp64."""
    tiles.TILE, dense.BLOCK = tile, min(tile, dense.BLOCK)
    tiles.G_BYTES = part_bytes or tiles.G_BYTES
    topk_kernels.launch_for = lambda heads, width: SMALL
    made = inputs(sq, batch, heads, width, attention, dtype=torch.float32, std=std)
    counts = rows_that_count(batch, sq) if rows is True else None if rows is False else rows
    loss = Loss(
        softmax_scale=0.3, coefficient=0.7, sparse=sparse, inside_logs=inside_logs,
        repeatable=repeatable,
    )  # fmt: skip
    leaves = [x.clone().requires_grad_() for x in made[:3]]
    call = autograd.Call(5, loss, bounds, counts, use_relu)
    value, indices = autograd.indexer_loss_on_cuda(*leaves, *made[3:], call)
    (value * 1.3).backward()
    true = [x.double().requires_grad_() for x in made]
    want = indexer_loss(*true, 5, loss, bounds=bounds, rows=counts, use_relu=use_relu)
    (want.loss * 1.3).backward()
    assert torch.equal(indices, want.indices)
    assert relative(value, want.loss) < 2e-6
    for mine, theirs in zip(leaves, true, strict=False):
        assert relative(mine.grad, theirs.grad) < 5e-6


def check_target(
    sq: int,
    sk: int,
    batch: int,
    attention: tuple[int, int],
    topk: int,
    *,
    tile: int,
    part_bytes: int | None = None,
    softmax_scale: float = 0.3,
) -> None:
    """The target with a key per head of the last queries, for keys chosen at random.

    The first row of each sequence has none, the others up to top-k.
    """
    tiles.TILE, dense.BLOCK = tile, min(tile, dense.BLOCK)
    tiles.G_BYTES = part_bytes or tiles.G_BYTES
    heads, width = attention
    q, k, w, query, key = inputs(sk, batch, 1, 16, (heads, heads, 2 * width), dtype=torch.float32)
    query, key = query[sk - sq :, ..., :width], key[..., width:]
    valid = reference.valid_keys(sq, sk, batch, None, None, q.device)
    chances = torch.rand(batch, sq, sk, generator=torch.Generator().manual_seed(1))
    indices = reference.choose(chances.masked_fill(~valid | (chances < 0.3), -torch.inf), topk)
    indices[:, 0] = -1
    index = tiles.IndexTiles(q[sk - sq :], k, w[sk - sq :], starts=None, ends=None, use_relu=True)
    found = per_head.target(index, query, key, indices, softmax_scale)
    support = reference.chosen_keys(indices, valid)
    true = reference.target(query.double(), key.double(), support, softmax_scale)
    true = true.gather(-1, indices.clamp(min=0).long()).masked_fill(indices < 0, 0.0)
    # Products of fp32 are as exact as the largest of them, which the exponential makes relative.
    torch.testing.assert_close(found.double(), true, rtol=1e-5 * softmax_scale, atol=1e-7)


def check_errors(
    sparse: bool,
    sq: int,
    batch: int,
    heads: int,
    width: int,
    attention: tuple[int, int, int],
    bounds: Bounds,
    *,
    std: float,
    use_relu: bool,
) -> None:
    """Errors against fp64 at most 1.5 times those of fp32 rounded to bf16."""
    how: dict[str, Any] = {"device": "cuda", "std": std}
    made = inputs(sq, batch, heads, width, attention, dtype=torch.bfloat16, **how)
    rows = rows_that_count(batch, sq).cuda()
    loss = Loss(softmax_scale=attention[2] ** -0.5, coefficient=0.7, sparse=sparse)

    def run(tensors: tuple[Tensor, ...]) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in tensors[:3]]
        out = indexer_loss(
            *leaves, *tensors[3:], 64, loss, bounds=bounds, rows=rows, use_relu=use_relu
        )
        (out.loss * 1.37).backward()  # not a power of two
        return [out.loss.detach(), *(x.grad for x in leaves)]

    found = run(made)
    floor = run(tuple(x.float() for x in made))
    true = run(tuple(x.double() for x in made))
    assert relative(found[0], true[0]) < max(3e-6, 1.5 * relative(floor[0].bfloat16(), true[0]))
    for mine, low, exact in zip(found[1:], floor[1:], true[1:], strict=True):
        assert mine.dtype == torch.bfloat16
        assert relative(mine, exact) < 1.5 * relative(low.bfloat16(), exact)
