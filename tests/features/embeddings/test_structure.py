"""The structure embedding against plain indexing in fp64."""

from __future__ import annotations

import torch

from cppmega.features.embeddings.structure import StructureEmbedding
from cppmega.sizes.embeddings import Structure

KINDS = torch.tensor([[0, 8, 3, 3, 1], [2, 2, 0, 5, 8]])
DEPTHS = torch.tensor([[0, 15, 1, 2, 2], [7, 7, 0, 15, 3]])


def built(dtype: torch.dtype = torch.float64) -> StructureEmbedding:
    return StructureEmbedding(Structure(bottleneck=6), 10, 0.02, dtype, torch.device("cpu"))


def embedded(made: StructureEmbedding, rows: torch.Tensor) -> torch.Tensor:
    """[s, b, hidden], what a model adds to its tokens."""
    return made.columns(rows) @ made.matrix().t()


def test_it_is_the_scaled_sum_of_two_rows_widened() -> None:
    made = built()
    torch.manual_seed(0)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    rows = made.table_rows(KINDS, DEPTHS, KINDS)
    rows[:, 1, 4] = 0  # as a shift leaves it past the end
    ours = embedded(made, rows)
    kind, depth = made.scales
    summed = kind * made.kinds[KINDS] + depth * made.depths[DEPTHS]
    plain = (summed @ made.widening.t()).transpose(0, 1)
    mask = torch.ones(5, 2, 1, dtype=torch.float64)
    mask[4, 1] = 0
    torch.testing.assert_close(ours, plain * mask, rtol=0, atol=1e-13)
    upstream = torch.randn(ours.shape, dtype=torch.float64)
    gradients = [
        torch.autograd.grad((out * upstream).sum(), list(made.parameters()))
        for out in (ours, plain * mask)
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_one_factor_alone_starts_from_zero() -> None:
    """Two factors at zero would have no gradient, ever."""
    made = built(torch.float32)
    out = embedded(made, made.table_rows(KINDS, DEPTHS, KINDS))
    assert not out.any()
    first = torch.autograd.grad(out.sum(), list(made.parameters()))
    had = {name for (name, _), g in zip(made.named_parameters(), first, strict=True) if g.any()}
    assert had == {"widening"}
    with torch.no_grad():
        made.widening -= 0.1 * first[-1]
    embedded(made, made.table_rows(KINDS, DEPTHS, KINDS)).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in made.parameters())


def test_every_rank_draws_the_same_tables_and_leaves_the_random_state() -> None:
    before = torch.random.get_rng_state()
    one, other = built(), built()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(one.kinds, other.kinds) and torch.equal(one.depths, other.depths)
    assert one.kinds.std() > 0.01 and not torch.equal(one.kinds, one.depths[:9])
