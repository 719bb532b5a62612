"""Rows of hashed n-grams, and their lookup, against plain Python in fp64."""

from __future__ import annotations

import pytest
import torch

from cppmega.ops import ngram_hash
from cppmega.ops.ngram_hash import naive as ngram_hash_reference
from tests.ops.in_interpreter import run
from tests.ops.kernel_memory import check_fits, record
from tests.ops.launch_counts import modules_of
from tests.ops.ngram_hash import checks as ngram_hash_checks

DOCUMENTS = ([7, 3, 60, 3, 60, 1], [5], [7, 3], [9, 9, 9, 9, 9])
"""Ragged: one is shorter than every n-gram."""


@pytest.mark.parametrize(("orders", "heads"), [((2, 3), 2), ((3,), 1), ((1, 4), 2)])
def test_a_pack_is_embedded_as_its_documents_alone(orders: tuple[int, ...], heads: int) -> None:
    sizes = (11, 13, 17, 19)[: len(orders) * heads]
    hashed_with = ngram_hash.hashing(orders, heads, sizes, seed=3)
    generator = torch.Generator().manual_seed(1)
    tables, projection = (
        torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((sum(sizes), 3), (5, 3 * len(sizes)))
    )
    rows = ngram_hash.table_rows(*_pack(), hashed_with)
    ours = ngram_hash.lookup(tables, rows.permute(1, 2, 0)).flatten(-2) @ projection.t()
    reference = ngram_hash_reference.embedding(DOCUMENTS, hashed_with, tables, projection)
    torch.testing.assert_close(ours[0], reference, rtol=0, atol=1e-13)
    upstream = torch.randn(reference.shape, generator=generator, dtype=torch.float64)
    ours, theirs = (
        torch.autograd.grad((out * upstream).sum(), (tables, projection))
        for out in (ours[0], reference)
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def _pack() -> tuple[torch.Tensor, torch.Tensor]:
    starts = [place == 0 for document in DOCUMENTS for place in range(len(document))]
    return torch.tensor([[token for document in DOCUMENTS for token in document]]), torch.tensor(
        [starts]
    )


def test_the_multipliers_are_those_of_the_seed_and_of_nothing_else() -> None:
    """Checkpoints hold them: another number here would refuse every one that exists."""
    before = torch.random.get_rng_state()
    drawn = ngram_hash.hashing((2, 3), 1, (499_801, 500_041), seed=20_141)
    assert drawn.tolist() == [[499801, 368937, 68669, 0], [500041, 489736, 414115, 414422]]
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(5)
    assert drawn.equal(ngram_hash.hashing((2, 3), 1, (499_801, 500_041), seed=20_141))
    assert not drawn.equal(ngram_hash.hashing((2, 3), 1, (499_801, 500_041), seed=20_142))


def test_heads_do_not_collide_together() -> None:
    """Tables of one order hash alike only by chance: about one pair of bigrams in p."""
    tokens = torch.cartesian_prod(torch.arange(60), torch.arange(60))
    starts = torch.tensor([[True, False]]).expand(len(tokens), -1)
    hashed_with = ngram_hash.hashing((2,), 2, (997, 1009), seed=1)
    rows = ngram_hash.table_rows(tokens, starts, hashed_with)[:, :, 1]
    assert (rows > 0).all() and (rows <= 997 + 1009).all()
    both = (rows[0] * 10_000 + rows[1]).unique().numel()
    assert both > 0.995 * len(tokens)
    assert min(one.unique().numel() for one in rows) > 900


def test_a_frequent_n_gram_gets_all_of_its_gradient() -> None:
    """In bf16 a sum of ones stops at 256."""
    tables = torch.zeros(3, 2, dtype=torch.bfloat16, requires_grad=True)
    rows = torch.tensor([2] * 4_096 + [0] * 7 + [3])
    upstream = torch.linspace(0.5, 1.5, len(rows))[:, None].expand(-1, 2).bfloat16()
    ngram_hash.lookup(tables, rows).backward(upstream)  # type: ignore[no-untyped-call]
    assert tables.grad is not None
    wanted = torch.zeros(4, 2, dtype=torch.float64).index_add_(0, rows, upstream.double())[1:]
    torch.testing.assert_close(tables.grad.double(), wanted, rtol=2**-8, atol=0)


def test_the_number_of_tables_is_checked() -> None:
    with pytest.raises(ValueError, match="3 tables for 2 orders of 2 heads"):
        ngram_hash.hashing((2, 3), 2, (11, 13, 17), seed=0)


CHECKS = """
import torch
from cppmega.ops.ngram_hash import kernels_triton as ngram_hash_triton
from tests.ops.ngram_hash.checks import check
ngram_hash_triton.BLOCK, ngram_hash_triton.RUN = 16, 4
check(torch.float32, 16, 77)
check(torch.float16, 5, 33)
check(torch.float32, 3, 1)
check(torch.float32, 3, 0)
"""


def test_rows_are_read_and_summed_by_the_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run(CHECKS)


def test_rows_are_read_and_summed_by_torch() -> None:
    ngram_hash_checks.check(torch.bfloat16, 16, 777)
    ngram_hash_checks.check(torch.float32, 3, 0)


@pytest.mark.slow
def test_every_kernel_compiles_for_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    modules = modules_of("ngram_hash")
    found = record(monkeypatch, modules)
    monkeypatch.setattr(ngram_hash, "_by_kernels", lambda tables: True)
    tables = torch.zeros(50, 16, dtype=torch.bfloat16, requires_grad=True)
    read = ngram_hash.lookup(tables, torch.ones(64, 16, dtype=torch.int64))
    read.backward(torch.zeros_like(read))  # type: ignore[no-untyped-call]
    check_fits(found, modules)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_are_read_and_summed_on_cuda(dtype: torch.dtype) -> None:
    for dim, size in ((16, 40_000), (5, 333), (3, 0)):
        ngram_hash_checks.check(dtype, dim, size, "cuda")
