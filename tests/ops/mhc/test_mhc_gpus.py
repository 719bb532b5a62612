"""Every kernel of the hyper-connections compiles for every GPU, and fits its shared memory."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton.tools.tensor_descriptor", reason="the kernels need Triton 3.4 or later")

from cppmega.ops import mhc  # noqa: E402
from tests.ops.kernel_memory import LIMITS, Launch, record, shared_memory  # noqa: E402
from tests.ops.launch_counts import kernels_of, modules_of  # noqa: E402
from tests.ops.mhc.checks import Shape, drawn  # noqa: E402

pytestmark = pytest.mark.slow

MODULES = modules_of("mhc")
PRODUCTS = {"_projection_kernel", "_streams_gradient_kernel"}
"""The kernels whose tiles are largest."""


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """The kernels' path without a GPU, and its launches."""
    monkeypatch.setattr(mhc, "_device_obstacle", lambda name: None)
    return record(monkeypatch, MODULES)


def launches_of(found: list[Launch], shape: Shape, dtype: torch.dtype) -> list[Launch]:
    """What the ops of a site launch, each kernel once."""
    found.clear()
    streams, parameters, out, bias = drawn(shape, dtype)
    for leaf in (streams, *parameters, out, bias):
        leaf.requires_grad_()
    seen, site = mhc.read(streams, parameters, 20)
    new = mhc.write(site, out, bias)
    torch.autograd.backward((new, seen), (new.detach(), seen.detach()))
    logits = torch.zeros(8, shape.n, shape.n, requires_grad=True)
    mhc.sinkhorn(logits, 20).backward(torch.zeros(8, shape.n, shape.n))
    return list({kernel.__name__: (kernel, given) for kernel, given in found}.values())


@pytest.mark.parametrize("arch", [90, 100, 120])  # sm_80 takes what sm_120 takes, and has more
def test_the_largest_tiles_fit(arch: int, found: list[Launch]) -> None:
    taken: dict[str, int] = {}
    for dtype, n in itertools.product((torch.bfloat16, torch.float32), (4, 8)):
        for kernel, given in launches_of(found, Shape(40, 2, n, 256), dtype):
            if kernel.__name__ in PRODUCTS:
                taken[f"{kernel.__name__} {dtype} {n}"] = shared_memory(kernel, given, arch)
    assert len(taken) == 8
    assert {name: bytes_ for name, bytes_ in taken.items() if bytes_ > LIMITS[arch] << 10} == {}


def test_every_kernel_compiles(found: list[Launch]) -> None:
    launches = launches_of(found, Shape(40, 2, 4, 256), torch.bfloat16)
    assert {one[0].__name__ for one in launches} == {
        name for module in MODULES for name in kernels_of(module)
    }
    for kernel, given in launches:
        assert shared_memory(kernel, given, 90) <= LIMITS[90] << 10
