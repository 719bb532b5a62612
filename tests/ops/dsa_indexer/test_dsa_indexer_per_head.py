"""The sparse loss where the attention has a key per head: its kernels against plain torch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from cppmega.ops.dsa_indexer import (  # noqa: E402
    Bounds,
    Loss,
    choose_keys,
    indexer_loss,
    obstacle,
)
from tests.ops.dsa_indexer.test_dsa_indexer import CAUSAL, documents, inputs, interpreted  # noqa: E402

pytestmark = pytest.mark.slow


def test_the_kernels_give_loss_and_gradients() -> None:
    pytest.importorskip("triton")
    interpreted(
        """
check_loss(True, 9, 1, 3, 24, (3, 3, 16), documents(9), inside_logs=True, tile=16)
check_loss(True, 18, 2, 2, 16, (2, 2, 144), Bounds(), tile=16,
    use_relu=False, part_bytes=1, repeatable=True, rows=False)
check_loss(True, 22, 1, 2, 16, (2, 2, 24), documents(22), tile=128, std=20.0)
"""
    )


def test_the_kernels_give_the_target_of_any_chosen_keys() -> None:
    pytest.importorskip("triton")
    interpreted(
        """
for topk in (1, 50):
    check_target(5, 50, 2, (3, 24), topk, tile=64)
check_target(33, 40, 1, (2, 16), 20, tile=32, part_bytes=1)
check_target(5, 50, 1, (2, 16), 7, tile=64, softmax_scale=30.0)  # others' exponentials overflow
"""
    )


gpu = pytest.mark.gpu


@gpu
@pytest.mark.parametrize("std", [1.0, 5.0, 20.0])
@pytest.mark.parametrize(
    "heads, width, attention, use_relu",
    [
        (32, 64, (8, 8, 192), True),
        (32, 64, (32, 32, 128), True),
        (8, 32, (4, 4, 64), False),
        (64, 128, (3, 3, 80), True),
    ],
)
def test_errors_on_cuda(
    heads: int, width: int, attention: tuple[int, int, int], use_relu: bool, std: float
) -> None:
    from tests.ops.dsa_indexer.checks import check_errors

    length = 1024 if std == 1.0 else 1000
    bounds = CAUSAL if std == 1.0 else Bounds(*(x.cuda() for x in documents(length)))
    check_errors(True, length, 2, heads, width, attention, bounds, std=std, use_relu=use_relu)


def drawn(length: int, batch: int) -> tuple[Tensor, ...]:
    """8 heads with keys 192 wide, whose heads are a view of wider rows as MLA's are."""
    q, k, w, query, key = inputs(
        length, batch, 32, 64, (8, 8, 320), device="cuda", dtype=torch.bfloat16
    )
    assert obstacle(q, k) is None
    return q, k, w, query[..., :192], key[..., 128:]


def trained(made: tuple[Tensor, ...], topk: int, repeatable: bool) -> list[Tensor]:
    """Loss and gradients."""
    loss = Loss(softmax_scale=0.1, coefficient=0.5, sparse=True, repeatable=repeatable)
    leaves = [x.detach().requires_grad_() for x in made[:3]]
    out = indexer_loss(*leaves, *made[3:], topk, loss)
    (out.loss * 1.7).backward()
    return [out.loss.detach(), *(x.grad for x in leaves)]


@gpu
def test_gradients_repeat_on_cuda_and_do_not_depend_on_the_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from cppmega.ops.dsa_indexer import per_head_triton as per_head
    from cppmega.ops.dsa_indexer import tiles_triton as tiles

    made = drawn(1000, 2)
    first = trained(made, 128, repeatable=True)
    again = trained(made, 128, repeatable=True)
    assert all(map(torch.equal, first, again))
    index = tiles.IndexTiles(*made[:3], starts=None, ends=None, use_relu=True)
    indices = choose_keys(*made[:3], 128)
    one = per_head.target(index, *made[3:], indices, 0.1)
    monkeypatch.setattr(tiles, "G_BYTES", 4 * 2 * 1024 * 256)
    assert len(index.parts(4)) == 4
    assert torch.equal(per_head.target(index, *made[3:], indices, 0.1), one)


@gpu
def test_memory_is_that_of_one_head_on_cuda() -> None:
    made = drawn(4096, 1)
    trained(made, 256, repeatable=False)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    trained(made, 256, repeatable=False)
    one_head = 4 * 4096**2
    assert torch.cuda.max_memory_allocated() - held < 2.5 * one_head
