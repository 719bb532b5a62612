"""The Walsh-Hadamard transform against its matrix, and every promise its docstring makes."""

from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from cppmega.ops.pointwise.hadamard import walsh_hadamard  # noqa: E402
from cppmega.proof.host_sync import no_host_sync  # noqa: E402
from tests.ops.in_interpreter import run  # noqa: E402

pytestmark = pytest.mark.slow


def matrix(n: int) -> Tensor:
    """H in natural order: the sign of (i, j) is the parity of the bits that i and j share."""
    index = torch.arange(n)
    shared = index[:, None] & index
    parity = sum(shared >> bit & 1 for bit in range(n.bit_length())) % 2
    return (1 - 2 * parity).double()


def by_halves(x: Tensor) -> Tensor:
    """The definition by recursion; it adds neighbours first, as the CUDA kernel does."""
    if x.size(-1) == 1:
        return x
    low, high = (by_halves(half) for half in x.chunk(2, dim=-1))
    return torch.cat((low + high, low - high), dim=-1)


@pytest.mark.parametrize("n", [1 << power for power in range(11)])
def test_equals_its_matrix_in_fp64(n: int) -> None:
    whole = torch.randint(-(2**20), 2**20, (3, n)).double()
    assert torch.equal(walsh_hadamard(whole), whole @ matrix(n))  # integers: no rounding at all
    x = torch.randn(2, 5, n, dtype=torch.float64)
    torch.testing.assert_close(walsh_hadamard(x, 0.3), 0.3 * (x @ matrix(n)))


@pytest.mark.parametrize("n", [1 << 15, 1 << 20])
def test_long_rows_are_their_own_inverse(n: int) -> None:
    x = torch.randint(-100, 100, (1, n)).double()
    assert torch.equal(walsh_hadamard(walsh_hadamard(x), 1 / n), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_sums_in_the_order_of_the_kernel_and_rounds_once(dtype: torch.dtype) -> None:
    x = torch.randn(64, 128, dtype=torch.float32).mul(3).to(dtype)
    sums = by_halves(x if dtype == torch.float64 else x.float())
    y = walsh_hadamard(x, 128**-0.5)
    assert y.dtype == dtype
    assert torch.equal(y, (sums * 128**-0.5).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_gradient_is_the_same_transform(dtype: torch.dtype) -> None:
    x = torch.randn(7, 64, dtype=dtype, requires_grad=True)
    weights = torch.randn(7, 64, dtype=dtype)  # not uniform
    walsh_hadamard(x, 0.125).backward(weights)
    assert torch.equal(x.grad, walsh_hadamard(weights, 0.125))


def test_gradcheck_to_second_order() -> None:
    x = torch.randn(2, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: walsh_hadamard(x, 0.7), x)
    assert torch.autograd.gradgradcheck(lambda x: walsh_hadamard(x, 0.7) ** 2, x)


def test_any_layout_and_no_write_into_the_input() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(16, 3, 4, dtype=dtype).transpose(0, 2)  # rows of 16, not contiguous
        kept = x.clone()
        assert torch.equal(walsh_hadamard(x), walsh_hadamard(x.contiguous()))
        assert torch.equal(x, kept)
    assert walsh_hadamard(torch.zeros(0, 4, 8)).shape == (0, 4, 8)
    assert walsh_hadamard(torch.ones(8)).tolist() == [8.0] + [0.0] * 7


def test_a_row_does_not_depend_on_its_batch() -> None:
    x = torch.randn(257, 64)
    assert torch.equal(walsh_hadamard(x)[5], walsh_hadamard(x[5]))


@pytest.mark.parametrize("n", [0, 3, 96])
def test_refuses_other_sizes(n: int) -> None:
    with pytest.raises(ValueError, match=f"power of two, got {n}"):
        walsh_hadamard(torch.zeros(2, n))


def test_asks_the_device_for_nothing() -> None:
    x = torch.randn(4, 32, requires_grad=True)
    with no_host_sync():
        walsh_hadamard(x).sum().backward()


def test_the_file_imports_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import cppmega.ops.pointwise.hadamard"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_kernel_gives_the_bits_of_torch() -> None:
    pytest.importorskip("triton")
    code = """
import torch
from cppmega.ops.pointwise import hadamard
from cppmega.ops.pointwise import hadamard_triton

for n in [1 << power for power in range(11)] + [1 << 15]:
    for dtype in (torch.float32, torch.float16):
        x = torch.randn(5 if n < 1024 else 1, n).to(dtype)
        want = hadamard.walsh_hadamard(x, 0.3)
        assert torch.equal(hadamard_triton.transform(x, 0.3), want), (n, dtype)
strided = torch.randn(8, 3, 2).transpose(0, 2)
assert torch.equal(hadamard_triton.transform(strided, 1.0), hadamard.walsh_hadamard(strided))
assert hadamard_triton.transform(torch.zeros(0, 4, 8), 1.0).shape == (0, 4, 8)
assert not hadamard_triton.fits(torch.randn(2, 4))
"""
    run(code)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 2, 64, 128, 1024, 1 << 15, 1 << 16])
def test_cuda_gives_the_bits_of_the_cpu(n: int, dtype: torch.dtype) -> None:
    x = torch.randn(37, n).to(dtype)
    weights = torch.randn(37, n).to(dtype)  # not uniform
    there = x.cuda().requires_grad_()
    y = walsh_hadamard(there, 128**-0.5)
    y.backward(weights.cuda())
    assert torch.equal(y.cpu(), walsh_hadamard(x, 128**-0.5))
    assert torch.equal(there.grad.cpu(), walsh_hadamard(weights, 128**-0.5))
