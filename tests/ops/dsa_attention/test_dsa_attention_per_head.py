"""DSA's sparse attention with a key per head: its kernels against plain torch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from cppmega.ops.common.device import LEAST_SHARED, Gpu  # noqa: E402
from cppmega.ops.dsa_attention import per_head  # noqa: E402
from cppmega.ops.dsa_attention.per_head_tiles import HOPPER, OTHERS, tiles_for  # noqa: E402
from tests.ops.in_interpreter import run  # noqa: E402

pytestmark = pytest.mark.slow


def interpreted(code: str) -> None:
    """Run code in a process whose Triton kernels run in the interpreter, on CPU."""
    start = "import torch\nfrom tests.ops.dsa_attention.per_head_checks import *\nsmall_tiles()\n"
    run(start + code, warnings="ignore::RuntimeWarning")


def test_the_kernels() -> None:
    """In one process, as it takes longer to start than most of these checks."""
    interpreted(
        """
check(Shape(34, 34, 1, 3, 3, 3, 24, 16, 7), Bounds())
check(Shape(21, 21, 1, 4, 4, 4, 16, 8, 12), documents(21))
check(Shape(20, 75, 1, 2, 1, 2, 80, 40, 20), Bounds(), repeats=True)
check(Shape(33, 33, 1, 1, 1, 1, 16, 16, 20), Bounds(), dtype=torch.int16)
check(Shape(20, 20, 1, 3, 3, 1, 96, 64, 6), Bounds(), std=20.0)

# Bounds of a rank whose keys are gathered: by sequence, some beyond the keys, strides that differ.
starts = torch.arange(-3, 27)
ends = torch.stack([torch.arange(20, 80, 2), torch.arange(40, 70)])
check(Shape(30, 66, 2, 1, 1, 1, 16, 16, 30), Bounds(starts.expand(2, -1), ends))

# Nothing to attend to.
check_nothing(Shape(6, 6, 1, 2, 2, 2, 16, 16, 3), Bounds())
check_nothing(Shape(6, 6, 1, 2, 2, 2, 16, 16, 0), Bounds())
check_nothing(Shape(0, 6, 1, 2, 1, 2, 16, 16, 2), Bounds())
check_nothing(Shape(6, 0, 1, 2, 1, 2, 16, 16, 2), Bounds())

# Tiles without a chosen key are skipped; neither parts nor the place in a batch change a bit.
check_lists(Shape(90, 100, 2, 1, 1, 1, 16, 16, 4))
check_parts(Shape(70, 33, 1, 1, 1, 1, 16, 16, 9), Bounds())
check_places(Shape(20, 20, 2, 1, 1, 1, 16, 16, 9))

# dS has two terms: with one, the error of dq is 1.76 times that of rounding.
check_errors(Shape(64, 64, 1, 2, 2, 2, 64, 32, 24), Bounds(), std=20.0, dtype=torch.float16,
    device="cpu")
"""
    )


def test_parts_are_whole_tiles_within_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert per_head._parts(65536, 65536, 1) == [(0, 65536)]
    assert per_head._parts(65536, 65536, 2) == [(0, 32768), (32768, 65536)]
    monkeypatch.setattr(per_head, "BITS_BYTES", 1)
    assert per_head._parts(300, 10, 3) == [(0, 128), (128, 256), (256, 300)]


WIDTHS = {192: (128, 64), 256: (128, 128), 368: (192, 128), 384: (256, 128), 512: (256, 256)}
"""The widest of each row of the tables."""


def test_every_width_has_its_tiles() -> None:
    for gpu, table in ((Gpu((9, 0), 227 << 10), HOPPER), (Gpu((12, 0), LEAST_SHARED), OTHERS)):
        assert {most: tiles_for(*widths, gpu) for most, widths in WIDTHS.items()} == table
        assert all(tiles_for(d, v, gpu) for d in range(1, 257) for v in range(1, 257, 5))


gpu = pytest.mark.gpu


@gpu
@pytest.mark.parametrize("std", [1.0, 5.0, 20.0])
@pytest.mark.parametrize(
    ("heads", "key_heads", "width", "value_width"),
    [(8, 8, 192, 128), (3, 3, 128, 128), (32, 32, 128, 64), (4, 1, 96, 64), (2, 2, 256, 256),
     (2, 2, 72, 40)],
)  # fmt: skip
def test_errors_on_cuda(
    heads: int, key_heads: int, width: int, value_width: int, std: float
) -> None:
    from tests.ops.dsa_attention.per_head_checks import (
        Bounds,
        Shape,
        check_errors,
        documents,
    )

    sq, sk = (512, 1024) if std == 1.0 else (500, 500)
    shape = Shape(sq, sk, 1, heads, key_heads, key_heads, width, value_width, 128)
    bounds = Bounds() if std == 1.0 else Bounds(*(x.cuda() for x in documents(sq)))
    check_errors(shape, bounds, std=std)
    if heads == 3:
        check_errors(shape, bounds, std=std, dtype=torch.float16)


@gpu
def test_results_repeat_on_cuda() -> None:
    from tests.ops.dsa_attention.per_head_checks import (
        Bounds,
        Shape,
        check_places,
        choices,
        drawn,
        gradients,
    )  # fmt: skip

    shape = Shape(1000, 1000, 2, 8, 8, 8, 192, 128, 128)
    made = drawn(shape, device="cuda", dtype=torch.bfloat16)
    indices = choices(shape, "cuda")
    first = gradients(made, indices, 0.1, Bounds())
    for _ in range(20):
        assert all(map(torch.equal, first, gradients(made, indices, 0.1, Bounds())))
    check_places(shape, device="cuda", dtype=torch.bfloat16)


@gpu
def test_parts_on_cuda() -> None:
    from tests.ops.dsa_attention.per_head_checks import Bounds, Shape, check_parts

    shape = Shape(1000, 1000, 2, 4, 4, 4, 128, 64, 128)
    # In several parts dk is rounded from fp32 memory, as from registers in one.
    check_parts(shape, Bounds(), device="cuda", dtype=torch.bfloat16)


@gpu
def test_memory_on_cuda() -> None:
    """Above inputs, indices and results: the error of the output, row sums and bits."""
    from tests.ops.dsa_attention.per_head_checks import (
        Bounds,
        Shape,
        choices,
        drawn,
        gradients,
    )

    shape = Shape(2048, 2048, 1, 32, 32, 32, 128, 64, 256)
    made = drawn(shape, device="cuda", dtype=torch.bfloat16)
    indices = choices(shape, "cuda")
    gradients(made, indices, 0.1, Bounds())
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    results = gradients(made, indices, 0.1, Bounds())
    own = results[0].nbytes + 2 * 4 * 32 * 2048 + 3 * 2048 * 2048 // 8 + (4 << 20)
    assert torch.cuda.max_memory_allocated() - held < sum(x.nbytes for x in results) + own
