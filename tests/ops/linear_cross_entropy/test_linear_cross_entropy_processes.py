"""Linear cross-entropy on two and eight ranks, and its row kernel under Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from cppmega.ops.linear_cross_entropy import linear_cross_entropy  # noqa: E402
from cppmega.ops.linear_cross_entropy.chunks import softmax_of  # noqa: E402
from tests import forkserver  # noqa: E402
from tests.ops import in_interpreter  # noqa: E402
from tests.ops.linear_cross_entropy.cases import (  # noqa: E402
    UPSTREAMS,
    assert_same,
    dense,
    error,
    make_case,
    run,
)
from tests.support.processes import assert_all_pass, started  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("ranks", [2, 8])
def test_ranks_equal_one(ranks: int, tmp_path: Path) -> None:
    given = (forkserver.executable(), "-c", ONE_RANK, str(tmp_path / "store"), str(ranks))
    assert_all_pass([started(*given, str(rank)) for rank in range(ranks)])


ONE_RANK = """
import sys
from tests.ops.linear_cross_entropy.test_linear_cross_entropy_processes import check_rank, torch
torch.manual_seed(0)
check_rank(sys.argv[1], *map(int, sys.argv[2:]))
"""


def check_rank(store: str, ranks: int, rank: int) -> None:
    """Every rank must find what the dense computation finds."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks
    )
    group = torch.distributed.group.WORLD
    # Padding on the last rank: in part, not at all, and nothing but padding on it.
    for vocabulary, padding in ((60, 4), (64, 0), (20, 44)):
        case = make_case(vocabulary=vocabulary, padding=padding, std=3.0)
        shard = case.weight.shape[0] // ranks
        mine = slice(rank * shard, (rank + 1) * shard)
        want = dense(case, case.scalar * case.weights)
        want = want._replace(weight_grad=want.weight_grad[mine])
        local = case._replace(weight=case.weight.detach()[mine].clone().requires_grad_())
        for upstream in UPSTREAMS:
            whole = run(local, upstream, tp_group=group, chunk_tokens=8)
            assert_same(whole, want, 1e-12)
            part = run(local, upstream, tp_group=group, chunk_tokens=8, hidden_grad="partial")
            assert error(part.hidden_grad, want.hidden_grad) > 1e-3 or padding > vocabulary
            torch.distributed.all_reduce(part.hidden_grad)
            assert_same(part, want, 1e-12)
    # Equal maxima on all ranks: the lower token id.
    x, w = torch.ones(2, 2), torch.ones(3, 2)
    out = linear_cross_entropy(x, w, torch.tensor([5, 0]), tp_group=group, return_argmax=True)
    assert out.argmax is not None
    assert out.argmax.tolist() == [0, 0]
    torch.testing.assert_close(out.loss, torch.full((2,), 3.0 * ranks).log())
    torch.distributed.destroy_process_group()


def test_row_kernel_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    in_interpreter.run(INTERPRETED)


INTERPRETED = """
from tests.ops.linear_cross_entropy import test_linear_cross_entropy_processes as processes
processes.torch.manual_seed(0)
processes.check_interpreted()
"""


def check_interpreted() -> None:
    """The Triton kernels against the reference's rows, on the CPU (where bf16 is not exact)."""
    from cppmega.ops.linear_cross_entropy import kernels_triton as kernels
    from cppmega.ops.linear_cross_entropy import naive as reference

    kernels.ROW_GROUPS = 4  # several steps per row, as with a real vocabulary
    for dtype, std, vocabulary, columns in (
        (torch.float32, 1.0, 7, 7),
        (torch.float32, 20.0, 203, 190),
        (torch.float16, 5.0, 128, 128),
    ):
        z = torch.randn(5, vocabulary) * std
        z[0, : columns // 2] = z.max()  # equal maxima
        targets = torch.tensor([0, columns - 1, -1, columns // 2, -1])
        weights = torch.tensor([1.0, 0.0, 2.0, 0.5, 1.0])
        logits = kernels.logits_buffer(5, vocabulary, z.to(dtype)).copy_(z)
        assert logits.stride(0) % 64 == 0
        like = logits.float()
        want = reference.statistics(like, targets, columns, True)
        got = kernels.statistics(logits, targets, columns, True)
        for ours, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        same = kernels.logits_buffer(5, vocabulary, logits).copy_(logits)
        again = kernels.statistics_and_gradient_(same, targets, columns, weights, True)
        assert all(torch.equal(a, b) for a, b in zip(again, got, strict=True))
        kernels.gradient_(logits, targets, columns, softmax_of(got), weights)
        torch.testing.assert_close(logits, same, rtol=1e-6, atol=0)  # exp of numpy and of torch
        reference.gradient_(like, targets, columns, softmax_of(want), weights)
        torch.testing.assert_close(logits.float(), like, rtol=2e-3, atol=1e-4)
    nothing = torch.full((2,), -1)
    only_padding = kernels.statistics(torch.randn(2, 64), nothing, 0, True)
    assert bool((only_padding.maximum < -1e38).all())
    assert not only_padding.others.any()
    not_a_number = torch.tensor([[1.0, float("nan"), 2.0, 0.0]])
    for target in (-1, 0, 1):
        found = kernels.statistics(not_a_number, torch.tensor([target]), 4, False)
        assert softmax_of(found).total.isnan().all()
    confident = kernels.logits_buffer(1, 8, torch.zeros(1))
    confident.copy_(torch.tensor([[0.0, 1.0, 20.0, 0.5, -3.0, 2.0, 1.0, 0.0]]))
    others = (confident[0, [0, 1, 3, 4, 5, 6, 7]].double() - 20).exp().sum()
    kernels.statistics_and_gradient_(confident, torch.tensor([2]), 8, torch.ones(1), False)
    torch.testing.assert_close(-confident[0, 2].double(), others / (1 + others), rtol=1e-6, atol=0)
    source = torch.randn(5001)
    scaled = kernels.scaled(source, torch.tensor(0.3), torch.float16)
    assert torch.equal(scaled, (source * torch.tensor(0.3)).to(torch.float16))
    assert kernels.scaled(source[:0], torch.tensor(0.3), torch.float16).shape == (0,)
