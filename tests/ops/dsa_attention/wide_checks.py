"""Checks of the wide sparse attention's kernels, for the interpreter and for a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from cppmega.ops.common.bounds import Bounds
from cppmega.ops.dsa_attention import naive as reference
from cppmega.ops.dsa_attention import wide_backward_triton as backward
from cppmega.ops.dsa_attention.problem import Absorbed, Attended
from cppmega.ops.dsa_attention.wide_triton import forward
from tests.ops.dsa_indexer.checks import relative
from tests.ops.dsa_indexer.test_dsa_indexer import documents

__all__ = ["Bounds", "check_errors", "check_exact", "documents"]


def chosen(batch: int, sq: int, sk: int, topk: int, seed: int = 1) -> Tensor:
    """Keys in any order, each at most once in a row, with holes; the second row has none.

    Keys behind the query are among them, and numbers that are no key.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(batch, sq, sk + topk, generator=generator).argsort(-1)[..., :topk]
    indices = torch.where(order < sk, order, -1).to(torch.int32)
    indices[..., topk // 2] = sk + 3
    indices[:, 1] = -1
    return indices


def drawn(
    sq: int, sk: int, batch: int, heads: int, widths: tuple[int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and an upstream gradient; all are views of wider rows."""
    generator = torch.Generator().manual_seed(0)
    v, r = widths

    def normal(*shape: int) -> Tensor:
        wider = torch.randn(*shape[:-1], shape[-1] + 16, generator=generator)
        return wider.to(dtype)[..., : shape[-1]]

    return (
        normal(sq, batch, heads, v + r),
        normal(sk, batch, 1, v + r),
        normal(sq, batch, heads, v),
    )


def true_results(call: Absorbed, grad: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Output, dq and dkv of the plain path, computed in a type."""
    query, key = (x.detach().to(dtype).requires_grad_() for x in (call.query, call.key))
    seen = reference.visible(call.indices, key.size(0), call.starts, call.ends)
    outs = []
    # A head at a time: the plain path copies the chosen keys for each of its heads.
    for head, share in zip(query.split(1, 2), grad.to(dtype).split(1, 2), strict=True):
        value = key[..., : call.value]
        out = reference.attention(head, key, value, call.indices, seen, call.softmax_scale)
        out.backward(share)
        outs.append(out.detach())
    assert query.grad is not None and key.grad is not None
    return [torch.cat(outs, 2), query.grad, key.grad]


def results(call: Absorbed, grad: Tensor) -> tuple[list[Tensor], Attended]:
    """The same of the kernels, and of dkv as it is summed in one order; and what was kept."""
    attended = forward(call, want_rest=True)
    work = backward.WideBackward(call, attended, grad)
    found = [attended.out, *work.gradients(repeatable=False), work.gradients(repeatable=True)[1]]
    return found, attended


def check_exact(
    sq: int,
    sk: int,
    batch: int,
    heads: int,
    widths: tuple[int, int],
    topk: int,
    bounds: Bounds,
    *,
    scale: float = 0.2,
    part_bytes: int = 1 << 29,
) -> None:
    """Output and gradients of fp32 inputs against the plain path in fp64."""
    backward.SCRATCH_BYTES = backward.ORDERED_BYTES = part_bytes
    query, key, grad = drawn(sq, sk, batch, heads, widths, torch.float32)
    indices = chosen(batch, sq, sk, topk)
    call = Absorbed(query, key, widths[0], indices, scale, *bounds)
    found, attended = results(call, grad)
    true = true_results(call, grad, torch.float64)
    for mine, exact in zip(found, (*true, true[2]), strict=True):
        assert relative(mine, exact) < 3e-6
    assert not found[0][1].any() and torch.isinf(attended.lse[1]).all()


def check_errors(
    sq: int,
    batch: int,
    heads: int,
    widths: tuple[int, int],
    topk: int,
    bounds: Bounds,
    std: float,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Errors on CUDA against fp64 at most 1.5 times those of fp32 rounded to 16 bits."""
    query, key, grad = (x.cuda() for x in drawn(sq, sq, batch, heads, widths, dtype))
    indices = chosen(batch, sq, sq, topk).cuda()
    scale = std * sum(widths) ** -0.5
    call = Absorbed(query, key, widths[0], indices, scale, *bounds)
    found, _ = results(call, grad)
    true, floor = (true_results(call, grad, kind) for kind in (torch.float64, torch.float32))
    for name, mine, low, exact in zip(
        ("out", "dq", "dkv", "dkv in one order"), found, (*floor, floor[2]), (*true, true[2]),
        strict=True,
    ):  # fmt: skip
        assert mine.dtype == dtype
        times = relative(mine, exact) / relative(low.to(dtype), exact)
        assert times <= 1.5, (name, times)
