"""DSA's sparse attention with a wide latent: its kernels against plain torch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from cppmega.ops.common.bounds import Bounds  # noqa: E402
from cppmega.ops.common.device import Gpu  # noqa: E402
from cppmega.ops.dsa_attention.wide_tiles import tiles_of, wide_obstacle  # noqa: E402
from tests.ops.dsa_indexer.test_dsa_indexer import documents  # noqa: E402
from tests.ops.in_interpreter import run  # noqa: E402
from tests.ops.kernel_memory import LIMITS  # noqa: E402


@pytest.mark.slow
def test_the_kernels_give_output_and_gradients() -> None:
    pytest.importorskip("triton")
    code = """
import torch
from tests.ops.dsa_attention.wide_checks import *

check_exact(6, 6, 2, 3, (32, 16), 5, Bounds())
check_exact(4, 90, 1, 17, (32, 16), 70, Bounds(), part_bytes=1)  # context parallelism, two blocks
check_exact(12, 12, 1, 2, (16, 0), 9, documents(12), scale=4.0)
starts, ends = documents(14)
check_exact(14, 14, 2, 2, (16, 16), 14, Bounds(starts.expand(2, 14), ends.repeat(2, 1)))
check_exact(3, 3, 2, 2, (16, 16), 1, Bounds(torch.zeros(3), torch.tensor([[1, 2, 3]] * 2)))
"""
    run(code, warnings="ignore::RuntimeWarning")


@pytest.mark.parametrize("arch", LIMITS)
@pytest.mark.parametrize("heads", [1, 8, 64, 128])
def test_there_are_tiles_for_every_gpu(arch: int, heads: int) -> None:
    gpu = Gpu((arch // 10, arch % 10), LIMITS[arch] * 1024)
    for v, r in ((512, 64), (256, 32), (512, 128), (256, 0)):
        assert wide_obstacle(heads, v, r, gpu) is None
        assert all(64 % tile.keys == 0 for tile in tiles_of(heads, v, r, gpu))


def test_a_shape_without_tiles_is_refused_by_name() -> None:
    small = Gpu((12, 1), 99 * 1024)
    assert wide_obstacle(8, 4096, 64, small) == (
        "sm_121 lacks the shared memory for 8 heads of 4096+64"
    )
    for r in (8, 48):
        assert wide_obstacle(8, 512, r, small) == (
            f"keys of 512+{r} columns are not powers of two of at least 16"
        )


gpu = pytest.mark.gpu


@gpu
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # in a thread of autograd
@pytest.mark.parametrize("std", [1.0, 5.0, 20.0])
@pytest.mark.parametrize(
    "heads, widths, topk",
    [(8, (512, 64), 256), (64, (512, 64), 200), (128, (512, 64), 256), (24, (256, 32), 300)],
)
def test_errors_on_cuda(heads: int, widths: tuple[int, int], topk: int, std: float) -> None:
    from tests.ops.dsa_attention.wide_checks import check_errors

    sq = 200 if heads == 128 else 320
    bounds = Bounds() if std == 1.0 else Bounds(*(x.cuda() for x in documents(sq)))
    check_errors(sq, 2, heads, widths, topk, bounds, std)
