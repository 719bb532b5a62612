"""The Triton kernels of Mamba-3's scan: interpreted, compiled, and on a GPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from cppmega.ops import mamba3  # noqa: E402
from cppmega.ops.common.device import Gpu  # noqa: E402
from cppmega.ops.mamba3 import Inputs, autograd, external, operands, scan  # noqa: E402
from tests.ops import gluon  # noqa: E402
from tests.ops.in_interpreter import run  # noqa: E402
from tests.ops.kernel_memory import LIMITS, record, shared_memory  # noqa: E402
from tests.ops.mamba3.checks import Shape, drawn  # noqa: E402
from tests.ops.mamba3.errors import ON_GPU, WIDE  # noqa: E402
from tests.ops.mamba3.scan_checks import check  # noqa: E402

pytestmark = pytest.mark.slow

INTERPRETED = """
import torch
from torch.nn import functional
from cppmega.ops.mamba3 import scan
from tests.ops.mamba3.checks import Shape
from tests.ops.mamba3.scan_checks import check, check_layouts
torch.manual_seed(0)
scan.SCRATCH = 1  # a sequence at a time
FULL, HALF = torch.float32, torch.float16  # bf16 is truncated here
check(Shape(1, 41, 4, 2, 2, 32, 16), FULL, bounds=[0, 1, 16, 16, 30, 39])
check(Shape(1, 52, 2, 1, 4, 32, 16), HALF, "heavy_tail", [0, 5, 38, 52], dt=-3.0)
check(Shape(2, 17, 2, 2, 4, 32, 16), FULL, "heavy_tail", dt=6.0)
check(Shape(1, 33, 2, 1, 4, 32, 16), FULL, bounds=[0, 16, 33], dt=-3.0)  # chunks of 16
check(Shape(1, 70, 4, 2, 1, 32, 16), FULL, bounds=[0, 1, 16, 65, 69])
check_layouts(Shape(2, 3, 2, 1, 4, 32, 16))
"""


def test_in_the_interpreter() -> None:
    run(INTERPRETED)


WHOLE = Shape(2, 64, 128, 8, 4, 128, 64)


@pytest.mark.parametrize(
    ("shape", "arch", "programs"),
    [
        pytest.param(WHOLE, 90, 2, marks=gluon.needed),
        (Shape(1, 64, 2, 2, 4, 256, 64), 90, 1),  # the largest states and the smallest
        (Shape(1, 64, 2, 2, 4, 32, 16), 90, 2),
        pytest.param(WHOLE._replace(rank=2), 90, 2, marks=gluon.needed),
        pytest.param(WHOLE._replace(rank=1), 90, 2, marks=gluon.needed),
        (WHOLE, 80, 1),
        (WHOLE, 100, 2),
        (WHOLE, 120, 1),
    ],
)
def test_programs_fit_a_multiprocessor(
    shape: Shape, arch: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(divmod(arch, 10), LIMITS[arch] << 10)
    monkeypatch.setattr(scan, "gpu_of", lambda device: gpu)
    hopper = (arch, shape.state, shape.width) == (90, 128, 64)
    monkeypatch.setattr(scan, "on_hopper", lambda inputs: hopper)
    launches = record(monkeypatch, [scan, *gluon.launching()])
    inputs, parameters = drawn(shape, torch.bfloat16)
    assert not scan.obstacle(inputs, parameters)
    made = operands.plain(inputs, parameters, "softplus")
    learned = autograd._of_scan(parameters, inputs)
    upstream = scan.forward(made, inputs, learned, None)
    scan.backward(made, inputs, learned, None, upstream)
    assert len(launches) == (11 if hopper else 9)
    for kernel, arguments in launches:
        assert programs * shared_memory(kernel, arguments, arch) <= LIMITS[arch] << 10


@gluon.needed
def test_rows_at_odd_places_compile_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "gpu_of", lambda device: Gpu((9, 0), LIMITS[90] << 10))
    monkeypatch.setattr(scan, "on_hopper", lambda inputs: True)
    launches = record(monkeypatch, [scan, *gluon.launching()])
    inputs, parameters = drawn(WHOLE, torch.bfloat16)
    x, z = (torch.nn.functional.pad(each.flatten(2), (0, 8)) for each in inputs[:2])
    apart = inputs._replace(
        **{name: each[..., :-8].view(inputs.x.shape) for name, each in (("x", x), ("z", z))}
    )
    scan.forward(operands.plain(inputs, parameters, "softplus"), apart, parameters, None)
    kernel, arguments = next(one for one in launches if one[0].__name__ == "forward_sm90_kernel")
    assert shared_memory(kernel, arguments, 90) > 0


def test_a_gpu_that_is_too_old_or_small_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, parameters = drawn(WHOLE._replace(length=2), torch.bfloat16)
    monkeypatch.setattr(scan, "gpu_of", lambda device: Gpu((7, 5), 64 << 10))
    assert "need sm_80, not sm_75" in scan.obstacle(inputs, parameters)
    monkeypatch.setattr(scan, "gpu_of", lambda device: Gpu((12, 0), 99 << 10))
    assert not scan.obstacle(inputs, parameters)
    wide = drawn(WHOLE._replace(length=2, state=256), torch.bfloat16)
    assert "states of 256 x 64 need more shared memory than 99 KiB" in scan.obstacle(*wide)


@pytest.mark.parametrize(
    ("capability", "state", "version", "why"),
    [
        ((9, 0), 128, "3.6.0", ""),
        ((9, 0), 128, "3.7.0", "Triton is 3.7.0"),
        ((9, 0), 64, "3.6.0", "states are 64 x 64"),
        ((10, 0), 128, "3.6.0", "the GPU is sm_100"),
    ],
)
def test_the_kernels_taken_are_logged(
    capability: tuple[int, int],
    state: int,
    version: str,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("triton.__version__", version)
    monkeypatch.setattr(scan, "gpu_of", lambda device: Gpu(capability, LIMITS[90] << 10))
    scan._hopper.cache_clear()
    with caplog.at_level("INFO"):
        assert scan.on_hopper(drawn(WHOLE._replace(length=2, state=state))[0]) == (not why)
    assert (f"for every GPU, since {why}" if why else "for Hopper") in caplog.text
    scan._hopper.cache_clear()


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        (Shape(rank=3), "it supports ranks 1, 2 and 4 without an output norm, not rank 3"),
        (Shape(rank=4, out_norm=True), "without an output norm, not rank 4 with an output norm"),
        (Shape(rank=4), "2 heads per group, 8 or 5 is not a power of two"),
        (Shape(rank=2, width=16), "states of 8 x 16 are smaller than 32 x 16"),
        (Shape(rank=2, state=32, width=8), "states of 32 x 8 are smaller"),
        (Shape(rank=2, state=256, width=128), "states of 256 x 128 need more shared memory"),
        (Shape(rank=2, state=512, width=16), "states of 512 x 16 need more shared memory"),
        (Shape(rank=2, state=32, width=16), ""),
    ],
)
def test_the_obstacle_is_named(shape: Shape, why: str) -> None:
    found = scan.obstacle(*drawn(shape))
    assert why in found and bool(why) == bool(found)


@pytest.mark.parametrize(
    ("rank", "hopper", "absent", "taken"),
    [
        (4, False, "", "scan"),
        (1, True, "", "scan"),
        (1, False, "", "mamba-ssm"),
        (1, False, "mamba-ssm is not installed", "scan"),
    ],
)
def test_siso_takes_the_faster_kernels(
    rank: int, hopper: bool, absent: str, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, parameters = drawn(WHOLE._replace(length=2, rank=rank), torch.bfloat16)
    inputs = Inputs(*(each.to("meta") for each in inputs))
    monkeypatch.setattr(scan, "obstacle", lambda *given: "")
    monkeypatch.setattr(scan, "on_hopper", lambda inputs: hopper)
    monkeypatch.setattr(external, "obstacle", lambda *given: absent)
    monkeypatch.setattr(autograd, "mixed", lambda *given: "scan")
    monkeypatch.setattr(external, "mixed", lambda *given: "mamba-ssm")
    assert mamba3.mixed(inputs, parameters) == taken


KINDS = {
    **ON_GPU,
    "rank 2": (WIDE._replace(length=100, rank=2), None, 0.0),
    "SISO": (WIDE._replace(rank=1), None, 0.0),
    "SISO, 65 tokens": (WIDE._replace(length=65, rank=1), None, -3.0),
    "SISO, packed": (WIDE._replace(batch=1, length=300, rank=1), [0, 1, 16, 64, 117, 300], 0.0),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
def test_errors_are_those_of_bf16_products(name: str) -> None:
    shape, bounds, dt = KINDS[name]
    check(shape, torch.bfloat16, "softplus", bounds, dt, "cuda")
