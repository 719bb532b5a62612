"""The DSA indexer: plain torch against Megatron and torch, kernels against plain torch."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from cppmega.ops.dsa_indexer import (  # noqa: E402
    Bounds,
    Loss,
    choose_keys,
    indexer_loss,
    obstacle,
)
from cppmega.ops.dsa_indexer import naive as reference  # noqa: E402
from cppmega.proof.host_sync import no_host_sync  # noqa: E402
from tests.ops.in_interpreter import run  # noqa: E402

pytestmark = pytest.mark.slow

CAUSAL = Bounds()


def inputs(
    sq: int, batch: int, heads: int, width: int, attention: tuple[int, int, int], **how: Any
) -> tuple[Tensor, ...]:
    """q, k, weights, query, key; `attention` is heads, key heads and width."""
    many, key_heads, wide = attention
    normal = torch.Generator(device=how.get("device", "cpu")).manual_seed(how.pop("seed", 0))
    std = how.pop("std", 1.0)
    dtype = how.pop("dtype", torch.float64)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=normal, **how)

    # Scores of about this standard deviation.
    weights = drawn(sq, batch, heads) * (std * (2 / heads / width) ** 0.5)
    found = (drawn(sq, batch, heads, width), drawn(sq, batch, width), weights)
    found += (drawn(sq, batch, many, wide), drawn(sq, batch, key_heads, wide))
    return tuple(x.to(dtype) for x in found)


def documents(sq: int) -> Bounds:
    """Three packed documents, causal; one row sees nothing, one a single key."""
    row = torch.arange(sq)
    starts = torch.where(row < sq // 3, 0, torch.where(row < sq // 2, sq // 3, sq // 2))
    ends = row + 1
    ends[sq // 2 + 1] = 0
    starts[-1] = sq - 1
    return Bounds(starts, ends)


def rows_that_count(batch: int, sq: int) -> Tensor:
    return torch.arange(batch * sq).view(batch, sq) % 3 != 1


# The choice


def test_the_choice_is_torch_s_top_k_outside_of_ties() -> None:
    scores = torch.randn(2, 9, 40)
    scores[:, 3, 5:] = -torch.inf
    found = reference.choose(scores, 8)
    want = scores.topk(8)
    kept = want.indices.masked_fill(want.values == -torch.inf, 40).sort(-1).values
    assert torch.equal(found, kept.masked_fill(kept == 40, -1).int())
    assert found[0, 3].tolist()[5:] == [-1] * 3


def test_equals_are_taken_from_the_lowest_key_on() -> None:
    rows = torch.tensor(
        [
            [0.0] * 8,
            [-1.0, 0.0, -0.0, 0.0, -0.0, 2.0, -1.0, -0.0],
            [1.0, 5.0, 5.0, 5.0, 5.0, 0.0, 7.0, 5.0],
            [-2.0, -2.0, -1.0, -2.0, -torch.inf, -2.0, -2.0, -2.0],
        ]
    )
    want = [[0, 1, 2], [1, 2, 5], [1, 2, 6], [0, 1, 2]]
    assert reference.choose(rows, 3).tolist() == want


def test_more_keys_wanted_than_there_are() -> None:
    q, k, w, _, _ = inputs(5, 1, 2, 8, (1, 1, 8))
    found = choose_keys(q, k, w, 9)
    assert found.shape == (1, 5, 5) and found.dtype == torch.int32
    assert found[0].tolist() == [[*range(i + 1)] + [-1] * (4 - i) for i in range(5)]


# The loss


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("inside_logs", [False, True])
def test_the_gradient_is_p_minus_t(sparse: bool, inside_logs: bool) -> None:
    q, k, w, query, key = (x.requires_grad_() for x in inputs(12, 2, 3, 8, (4, 1, 8)))
    loss = Loss(softmax_scale=0.35, coefficient=0.7, sparse=sparse, inside_logs=inside_logs)
    bounds, rows = documents(12), rows_that_count(2, 12)
    out = indexer_loss(q, k, w, query, key, 4, loss, bounds=bounds, rows=rows)
    valid = reference.valid_keys(12, 12, 2, *bounds, q.device)
    scores = reference.scores(q, k, w, valid, True)
    support = reference.chosen_keys(reference.choose(scores, 4), valid) if sparse else valid
    s = torch.einsum("sbhd,tbd->bhst", query, key[:, :, 0]) * 0.35
    t = s.masked_fill(~support[:, None], -torch.inf).softmax(-1).nan_to_num(0.0).mean(1)
    p = scores.masked_fill(~support, -torch.inf).softmax(-1).nan_to_num(0.0)
    g = (p - t).detach() * rows[..., None] * (0.7 / rows.sum())
    want = torch.autograd.grad((g * scores.masked_fill(~valid, 0.0)).sum(), (q, k, w))
    found = torch.autograd.grad(out.loss, (q, k, w, query), allow_unused=True)
    for mine, true in zip(found, want, strict=False):
        torch.testing.assert_close(mine, true)
    assert found[3] is None
    e = 1e-10
    inside = (t * ((t + e).log() - (p + e).log())).sum(-1)
    outside = (t * (t.clamp_min(e).log() - p.clamp_min(1e-300).log())).sum(-1)
    value = ((inside if inside_logs else outside) * rows).sum() * (0.7 / rows.sum())
    torch.testing.assert_close(out.loss, value)


def test_the_loss_per_token_is_the_sum() -> None:
    made = inputs(10, 2, 2, 8, (2, 2, 8))
    how: dict[str, Any] = {"softmax_scale": 0.3, "coefficient": 2.0, "sparse": False}
    mean = indexer_loss(*made, 4, Loss(**how)).loss
    total = indexer_loss(*made, 4, Loss(**how, per_token=True)).loss
    torch.testing.assert_close(total, mean * 20)


def test_a_coefficient_of_zero_costs_the_choice_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = inputs(6, 1, 2, 8, (1, 1, 8))
    want = indexer_loss(*made, 3, Loss(softmax_scale=1.0, coefficient=1.0, sparse=True))
    monkeypatch.setattr(reference, "target", None)
    monkeypatch.setattr(reference, "kl_rows", None)
    found = indexer_loss(*made, 3, Loss(softmax_scale=1.0, coefficient=0.0, sparse=True))
    assert found.loss == 0 and torch.equal(found.indices, want.indices)


def test_the_host_waits_for_nothing() -> None:
    made = tuple(x.requires_grad_() for x in inputs(8, 1, 2, 8, (2, 1, 8)))
    rows = torch.ones(1, 8, dtype=torch.bool)
    bounds = Bounds(torch.zeros(8), torch.arange(1, 9))
    with no_host_sync():
        loss = Loss(softmax_scale=1.0, coefficient=1.0, sparse=False)
        indexer_loss(*made, 3, loss, bounds=bounds, rows=rows).loss.backward()


@pytest.mark.megatron
@pytest.mark.parametrize("sparse", [False, True])
def test_loss_choice_and_gradients_are_megatron_s(sparse: bool) -> None:
    dsa = pytest.importorskip("megatron.core.transformer.experimental_attention_variant.dsa")
    if not hasattr(dsa, "FusedDSAIndexerLoss"):
        pytest.skip("Megatron has no loss of this form before 0.17")

    class Alone:
        @staticmethod
        def size() -> int:
            return 1

    class Groups:
        tp = Alone

    # Sixteen heads: with fewer, ReLU makes ties, which Megatron breaks in another way.
    made = inputs(24, 2, 16, 16, (3, 3, 16), dtype=torch.float32)
    q, k, w, query, key = (x.requires_grad_() for x in made)
    mask = torch.full((24, 24), -torch.inf).triu(1)
    indices, want = dsa.FusedDSAIndexerLoss.apply(
        q, w, k, query, key, 0.25, 6, 0.5, mask, sparse, Groups, None, None, None, None, False, True
    )
    gradients = torch.autograd.grad(want * 3.0, (q, k, w))
    loss = Loss(softmax_scale=0.25, coefficient=0.5, sparse=sparse)
    out = indexer_loss(q, k, w, query, key, 6, loss)
    kept = indices.masked_fill(indices < 0, 24).sort(-1).values
    assert torch.equal(out.indices.long(), kept.masked_fill(kept == 24, -1))
    torch.testing.assert_close(out.loss, want)
    for mine, theirs in zip(torch.autograd.grad(out.loss * 3.0, (q, k, w)), gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


# The kernels


def interpreted(code: str) -> None:
    """Run code in a process whose Triton kernels run in the interpreter, on CPU."""
    start = "import torch\nfrom tests.ops.dsa_indexer.checks import *\n"
    run(start + code, warnings="ignore::RuntimeWarning")


def test_the_kernel_chooses_as_torch_does() -> None:
    pytest.importorskip("triton")
    interpreted(
        """
check_choice(7, 2, 3, 24, 4, Bounds(), torch.float16, integers=True)
check_choice(6, 1, 4, 16, 12, documents(6), torch.float32, integers=False)
check_plateaus()
"""
    )


@pytest.mark.parametrize("sparse", [True, False])
def test_the_kernels_give_loss_and_gradients(sparse: bool) -> None:
    pytest.importorskip("triton")
    interpreted(
        f"""
check_loss({sparse}, 9, 1, 3, 24, (3, 1, 16), documents(9), inside_logs=True, tile=16)
check_loss({sparse}, 18, 2, 2, 16, (2, 1 if {sparse} else 2, 144), Bounds(), tile=16,
    use_relu=False, part_bytes=1, repeatable=True, rows=False)
"""
    )


@pytest.mark.parametrize("sparse", [True, False])
def test_the_kernels_read_any_layout_of_rows_and_bounds(sparse: bool) -> None:
    """Bounds `[sq]` beside `[b, sq]`, and rows with an expanded batch or as a slice."""
    pytest.importorskip("triton")
    interpreted(
        f"""
starts, ends = documents(9)
both = torch.stack([ends, torch.arange(1, 10, dtype=torch.int32)])
counts = torch.tensor([1, 1, 0, 1, 0, 0, 1, 1, 1], dtype=torch.bool)
wider = torch.stack([torch.cat([counts, ~counts]), torch.cat([~counts, counts])])
for bounds, rows in (
    (Bounds(starts, both), counts.expand(2, 9)),
    (Bounds(both.long() - both, ends.expand(2, 9)), wider[:, :9]),
):
    check_loss({sparse}, 9, 2, 2, 16, (2, 1, 16), bounds, tile=16, rows=rows)
"""
    )


class Recorder:
    """Stands for a kernel and only counts its launches."""

    launches = 0

    def __getitem__(self, grid: object) -> Any:
        def launch(*args: object, **options: object) -> None:
            Recorder.launches += 1

        return launch


class Operators(TorchDispatchMode):  # type: ignore[misc]
    """Counts operators that start a kernel."""

    FREE = ("empty", "view", "detach", "transpose", "as_strided", "select", "t.", "slice", "alias")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::")
        if not name.startswith(("new_empty", *self.FREE)):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def counted(monkeypatch: pytest.MonkeyPatch, sq: int, batch: int, **how: Any) -> tuple[int, int]:
    """Launches of the forward and of the backward of one call."""
    from cppmega.ops.common import scaled_triton
    from cppmega.ops.dsa_indexer import autograd as dsa_indexer_autograd
    from cppmega.ops.dsa_indexer import dense_triton as dense
    from cppmega.ops.dsa_indexer import sparse_triton as sparse
    from cppmega.ops.dsa_indexer import tiles_triton as tiles
    from cppmega.ops.dsa_indexer import topk_triton as topk

    for module in (dense, sparse, tiles, topk, scaled_triton):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Recorder())
    made = inputs(sq, batch, 2, 16, (2, 1, 16), dtype=torch.bfloat16)
    made = tuple(x.requires_grad_() for x in made)
    loss = Loss(softmax_scale=1.0, coefficient=1.0, **how)
    call = dsa_indexer_autograd.Call(4, loss, CAUSAL, None, True)
    found, one = [], torch.ones(())
    Recorder.launches = 0
    with Operators() as operators:
        value, _ = dsa_indexer_autograd.indexer_loss_on_cuda(*made, call)
        found.append(Recorder.launches + len(operators.names))
        if value.requires_grad:
            torch.autograd.grad(value, made[:3], one)
        found.append(Recorder.launches + len(operators.names) - found[0])
    return found[0], found[1]


@pytest.mark.parametrize("repeatable", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_launches_do_not_depend_on_batch_or_sequence(
    sparse: bool, repeatable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    how = {"sparse": sparse, "repeatable": repeatable}
    few = counted(monkeypatch, 16, 1, **how)
    assert counted(monkeypatch, 300, 5, **how) == few
    assert few[0] <= 12 and few[1] == 3


def test_without_gradients_only_the_loss_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    for sparse in (False, True):
        paid = counted(monkeypatch, 16, 1, sparse=sparse)[0]
        with torch.no_grad():
            unpaid, backward = counted(monkeypatch, 16, 1, sparse=sparse)
        assert unpaid < paid and backward == 0


def test_obstacles_are_named() -> None:
    q, k = torch.empty(4, 1, 2, 16, device="meta"), torch.empty(4, 1, 16, device="meta")
    assert obstacle(q, k) == "the tensors are on meta"


# On a GPU

gpu = pytest.mark.gpu


@gpu
@pytest.mark.parametrize("heads, width", [(8, 32), (32, 64), (64, 128), (128, 128), (24, 48)])
def test_choice_on_cuda(heads: int, width: int) -> None:
    from tests.ops.dsa_indexer.checks import check_choice

    for bounds in (CAUSAL, Bounds(*(x.cuda() for x in documents(700)))):
        check_choice(
            700, 2, heads, width, 100, bounds, torch.bfloat16, integers=True, device="cuda"
        )


@gpu
def test_recall_on_cuda() -> None:
    made = inputs(3000, 1, 32, 64, (1, 1, 16), device="cuda", dtype=torch.bfloat16)
    found = choose_keys(*made[:3], 256)
    valid = reference.valid_keys(3000, 3000, 1, None, None, found.device)
    q, k, w = (x.double() for x in made[:3])
    scores = reference.scores(q, k, w, valid, True)
    cut = scores.topk(256).values[..., -1:]
    mine = reference.chosen_keys(found, valid)
    size = torch.einsum("sbhd,tbd->bsht", q.abs(), k.abs())
    band = torch.einsum("bsht,sbh->bst", size, w.abs()) * 2.0**-21
    assert not (valid & ~mine & (scores > cut + band)).any()
    assert not (mine & (scores < cut - band)).any()
    again = choose_keys(*made[:3], 256)
    assert torch.equal(found, again)


@gpu
@pytest.mark.parametrize("std", [1.0, 5.0, 20.0])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(
    "heads, width, attention, use_relu",
    [
        (32, 64, (32, 1, 128), True),
        (64, 128, (64, 1, 576), True),
        (8, 32, (4, 1, 64), False),
    ],
)
def test_errors_on_cuda(
    heads: int,
    width: int,
    attention: tuple[int, int, int],
    use_relu: bool,
    sparse: bool,
    std: float,
) -> None:
    from tests.ops.dsa_indexer.checks import check_errors

    bounds = CAUSAL if std == 1.0 else Bounds(*(x.cuda() for x in documents(500)))
    check_errors(sparse, 500, 2, heads, width, attention, bounds, std=std, use_relu=use_relu)


@gpu
@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_repeat_on_cuda(sparse: bool) -> None:
    loss = Loss(softmax_scale=0.1, coefficient=0.5, sparse=sparse, repeatable=True)

    def once() -> list[Tensor]:
        made = inputs(900, 2, 32, 64, (32, 1, 128), device="cuda", dtype=torch.bfloat16)
        leaves = [x.requires_grad_() for x in made[:3]]
        out = indexer_loss(*leaves, *made[3:], 128, loss)
        (out.loss * 1.7).backward()
        return [out.loss, *(x.grad for x in leaves)]

    for mine, again in zip(once(), once(), strict=True):
        assert torch.equal(mine, again)
