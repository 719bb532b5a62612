"""The kernels of Mamba-3's operands: interpreted, compiled, and on a GPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from cppmega.ops.mamba3 import operands  # noqa: E402
from cppmega.ops.mamba3 import operands_triton as kernels  # noqa: E402
from tests.ops.in_interpreter import run  # noqa: E402
from tests.ops.kernel_memory import LIMITS, record, shared_memory  # noqa: E402
from tests.ops.mamba3.checks import Shape, drawn  # noqa: E402

pytestmark = pytest.mark.slow

INTERPRETED = """
import torch
from tests.ops.mamba3.checks import Shape
from tests.ops.mamba3.operands_checks import check
torch.manual_seed(0)
check(Shape(2, 21, 5, 1, 3, 8), torch.float32)  # no size is a multiple of a program's tile
check(Shape(1, 17, 20, 4, 2, 16), torch.float16, "heavy_tail")  # bf16 is truncated here
check(Shape(2, 1, 4, 2, 1, 8), torch.float16, dt=-12.0)  # softplus far below zero
check(Shape(1, 16, 4, 2, 4, 8), torch.float32, dt=30.0)
check(Shape(2, 0, 4, 2, 4, 8), torch.float32)
check(Shape(1, 9, 4, 2, 1, 8), torch.float32, decay=-10.0)  # most rates are clamped
check(Shape(1, 9, 4, 2, 1, 8), torch.float32, "heavy_tail", decay=-12000.0)  # all of them
"""


def test_kernels_err_little_more_than_fp32_interpreted() -> None:
    run(INTERPRETED)


def test_the_gradient_of_angles_that_are_not_repeated_is_passed_through() -> None:
    inputs, parameters = drawn(Shape())
    found = operands.compute(inputs, parameters, "softplus", spread=False)
    assert found.angles is inputs.angles
    upstream = operands.Operands(*(torch.rand_like(each) for each in found))
    gradients = operands.gradients(inputs, parameters, "softplus", upstream)
    assert torch.equal(gradients.angles, upstream.angles)


@pytest.mark.parametrize("arch", [80, 90, 100, 120])
def test_two_launches_each_way_fit_every_gpu(arch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operands, "_by_kernels", lambda inputs: True)
    launches = record(monkeypatch, [kernels])
    given = drawn(Shape(2, 40, 128, 8, 4, 128), torch.bfloat16)
    made = operands.compute(*given, "softplus")
    assert len(launches) == 2
    operands.gradients(*given, "softplus", made)
    assert len(launches) == 4
    for kernel, arguments in launches:
        assert shared_memory(kernel, arguments, arch) <= LIMITS[arch] << 10


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("definition", ["softplus", "heavy_tail"])
def test_kernels_err_little_more_than_fp32_on_cuda(definition: str, dtype: torch.dtype) -> None:
    from tests.ops.mamba3.operands_checks import check

    for shape in (Shape(2, 4099, 128, 8, 4, 128), Shape(1, 333, 12, 2, 1, 64)):
        for dt in (-7.0, 0.0):
            check(shape, dtype, definition, dt, "cuda")  # type: ignore[arg-type]
