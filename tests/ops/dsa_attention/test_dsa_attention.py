"""The absorbed sparse attention: the reference against torch, kernels against the reference."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cppmega.ops.common.bounds import Bounds  # noqa: E402
from cppmega.ops.common.device import Gpu  # noqa: E402
from cppmega.ops.common.dispatch import debugging  # noqa: E402
from cppmega.ops.dsa_attention import (  # noqa: E402
    absorbed_obstacle,
    obstacle,
    sparse_attention,
)
from cppmega.ops.dsa_attention import naive as reference  # noqa: E402
from tests.ops.in_interpreter import run  # noqa: E402

pytestmark = pytest.mark.slow


def normal(*shape: int) -> Any:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("debug", ["1", "0"])
def test_a_repeated_key_is_an_error_in_debug_mode(
    debug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key = normal(3, 1, 2, 6), normal(5, 1, 1, 6)
    once = torch.tensor([[[0, -1, -1], [7, 7, 1], [2, 1, 0]]])
    monkeypatch.setenv("TRITON_DEBUG", debug)
    debugging.cache_clear()
    try:
        sparse_attention(query, key, 4, once, 0.3)
        with ExitStack() as stack:
            if debug == "1":
                stack.enter_context(pytest.raises(RuntimeError, match="more than once in a row"))
            sparse_attention(query, key, 4, once.index_fill(2, torch.tensor([2]), 0), 0.3)
    finally:
        debugging.cache_clear()


# The reference


@pytest.mark.parametrize("heads_of", [(1, 1), (3, 3), (1, 3), (3, 1)])
def test_the_reference_is_masked_dense_attention(heads_of: tuple[int, int]) -> None:
    torch.manual_seed(0)
    query, key, value = (
        normal(7, 2, 3, 8),
        normal(9, 2, heads_of[0], 8),
        normal(9, 2, heads_of[1], 5),
    )
    indices = torch.rand(2, 7, 9).argsort(-1)[..., :4].int()
    indices[:, 2, 1] = -1
    indices[:, 3] = 11
    starts, ends = torch.tensor([0, 0, 0, 0, 1, 2, 3]), torch.tensor([9, 9, 9, 9, 8, 5, 9])
    out = sparse_attention(query, key, value, indices, 0.4, bounds=Bounds(starts, ends))
    at = torch.arange(9)
    seen = (indices.unsqueeze(-1) == at).any(-2)
    seen &= (at >= starts[:, None]) & (at < ends[:, None])
    scores = torch.einsum("sbhd,tbhd->bhst", query, key.expand(-1, -1, 3, -1)) * 0.4
    p = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1).nan_to_num(0.0)
    want = torch.einsum("bhst,tbhv->sbhv", p, value.expand(-1, -1, 3, -1))
    torch.testing.assert_close(out, want)
    assert (out[3] == 0).all()
    upstream = torch.randn_like(out)
    found, true = (torch.autograd.grad(x, (query, key, value), upstream) for x in (out, want))
    for mine, other in zip(found, true, strict=True):
        torch.testing.assert_close(mine, other)


def test_absorbed_the_value_is_the_first_columns_of_the_key() -> None:
    query, key, indices = normal(5, 1, 2, 6), normal(5, 1, 1, 6), torch.arange(5).expand(1, 5, 5)
    found = sparse_attention(query, key, 4, indices, 0.3)
    torch.testing.assert_close(found, sparse_attention(query, key, key[..., :4], indices, 0.3))


def test_without_bounds_the_last_query_sees_all_keys() -> None:
    seen = reference.visible(torch.arange(5).expand(1, 3, 5), 5, None, None)
    assert seen.sum(-1).tolist() == [[3, 4, 5]]


def test_what_does_not_match_is_an_error() -> None:
    query, key = torch.zeros(4, 2, 3, 8), torch.zeros(6, 2, 1, 8)
    indices = torch.zeros(2, 4, 5, dtype=torch.int32)
    for wrong in (
        (query, key, 4, indices[:1]),
        (query, key, 4, indices[0]),
        (query, key[..., :7], 4, indices),
        (query, key.expand(-1, -1, 2, -1), key, indices),
        (query, key.expand(-1, -1, 3, -1), 4, indices),
        (query, key, 9, indices),
        (query, key, key[:5], indices),
    ):
        with pytest.raises(ValueError, match=r"are|columns"):
            sparse_attention(*wrong, 1.0)


def test_obstacles_are_named() -> None:
    query, key = torch.empty(4, 1, 2, 16, device="meta"), torch.empty(4, 1, 1, 16, device="meta")
    assert obstacle(query, key, 8) == "the tensors are on meta"
    gpu = Gpu((9, 0), 227 * 1024)
    assert absorbed_obstacle(128, 576, 512, gpu) is None
    assert absorbed_obstacle(24, 96, 80, gpu) is None
    assert absorbed_obstacle(8, 448, 384, gpu) == (
        "keys of 384+64 columns are not powers of two of at least 16"
    )
    assert "shared memory for 8 heads of 4096+64" in str(absorbed_obstacle(8, 4160, 4096, gpu))


# The kernels


def interpreted(program: str) -> None:
    """Run a program where Triton interprets its kernels."""
    run(f"from tests.ops.dsa_attention.checks import *\nimport torch\n{program}")


def test_the_kernels_give_output_and_gradients() -> None:
    pytest.importorskip("triton")
    interpreted(
        """
check(Shape(sq=9, sk=9, batch=2, heads=3, latent=16, rotary=16, topk=9), documents(9))
check(Shape(sq=6, sk=40, batch=1, heads=18, latent=24, rotary=8, topk=24), Bounds(), std=20.0)
check(Shape(sq=5, sk=5, batch=1, heads=3, latent=32, rotary=0, topk=3), Bounds())

# In parts, a batch element at a time, then 32 queries at a time.
shape = Shape(sq=8, sk=8, batch=3, heads=2, latent=16, rotary=16, topk=5)
check(shape, Bounds(), scratch=8 * 5 * 32 * 4)
bounds = Bounds(*(x.clamp(max=9).expand(2, 34) for x in documents(34)))
check(Shape(sq=34, sk=12, batch=2, heads=1, latent=16, rotary=0, topk=4), bounds, scratch=1)
"""
    )


# On a GPU

gpu = pytest.mark.gpu

SIZES = [
    (32, 64, 64, 256),
    (8, 64, 64, 256),
    (24, 64, 64, 100),
    (128, 64, 64, 256),
    (5, 32, 16, 33),
    (32, 96, 32, 200),
    (32, 128, 64, 256),
    (48, 128, 128, 64),
    (16, 64, 0, 16),
]


@gpu
@pytest.mark.parametrize("std", [1.0, 5.0, 20.0])
@pytest.mark.parametrize("heads, latent, rotary, topk", SIZES)
def test_errors_on_cuda(heads: int, latent: int, rotary: int, topk: int, std: float) -> None:
    from tests.ops.dsa_attention.checks import Shape, check_errors, documents

    shape = Shape(500, 500, 2, heads, latent, rotary, topk)
    bounds = Bounds() if std == 1.0 else Bounds(*(x.cuda() for x in documents(500)))
    check_errors(shape, bounds, std=std, dtype=torch.bfloat16)


@gpu
def test_fp16_and_more_keys_than_queries_on_cuda() -> None:
    from tests.ops.dsa_attention.checks import Shape, check_errors

    check_errors(Shape(300, 1200, 1, 32, 64, 64, 256), Bounds(), std=3.0, dtype=torch.float16)


@gpu
def test_the_deterministic_mode_repeats_on_cuda() -> None:
    from tests.ops.dsa_attention.checks import Shape, drawn, gradients

    shape = Shape(1000, 1000, 3, 32, 64, 64, 256)
    given = drawn(shape, dtype=torch.bfloat16, device="cuda", std=5.0)
    first = gradients(shape, given, Bounds(), True)
    for _ in range(100):
        again = gradients(shape, given, Bounds(), True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    alone = given._replace(
        query=given.query[:, 2:], key=given.key[:, 2:], upstream=given.upstream[:, 2:],
        indices=given.indices[2:],
    )  # fmt: skip
    found = gradients(shape._replace(batch=1), alone, Bounds(), True)
    assert all(torch.equal(a[:, 2:], b) for a, b in zip(first, found, strict=True))


@gpu
def test_torch_s_deterministic_mode_is_asked_on_cuda() -> None:
    from tests.ops.dsa_attention.checks import Shape, drawn

    shape = Shape(2000, 2000, 1, 32, 64, 64, 256)
    given = drawn(shape, dtype=torch.bfloat16, device="cuda")
    key = given.key.requires_grad_()

    def once() -> Any:
        out = sparse_attention(given.query, key, 64, given.indices, given.scale)
        return torch.autograd.grad(out, key, given.upstream)[0]

    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(once(), once())
    finally:
        torch.use_deterministic_algorithms(False)
