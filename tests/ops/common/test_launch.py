"""Every kernel is launched on the device of its tensors, and states how it rounds."""

from __future__ import annotations

import ast
import contextlib
import importlib
import pkgutil
from collections.abc import Iterator
from inspect import getsource
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime import KernelInterface

import cppmega
from cppmega.ops.common import launch as launch_device
from tests.ops import gluon


class FakeTensor:
    """A kernel's argument on a device that is not here."""

    def __init__(self, device: int) -> None:
        self.device = device

    def get_device(self) -> int:
        return self.device


class Descriptor:
    """A kernel's argument that describes tiles of a tensor."""

    def __init__(self, base: FakeTensor) -> None:
        self.base = base


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Devices of which the last is current; device 0 at first."""
    devices = [0]

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        devices.append(index)
        yield
        devices.pop()

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: devices[-1], raising=False)
    monkeypatch.setattr(torch.cuda, "device", device)
    return devices


def kernels() -> dict[str, Any]:
    """Every kernel that any module of cppmega launches as `kernel[grid](...)`."""
    found = {}
    for module in pkgutil.walk_packages(cppmega.__path__, "cppmega."):
        if "ops" not in module.name:
            continue
        try:
            loaded = importlib.import_module(module.name)
        except ImportError:
            if gluon.PRESENT:
                raise
            continue
        for node in ast.walk(ast.parse(getsource(loaded))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                name = ast.unparse(node.func.value)
                with contextlib.suppress(Exception):  # an expression of local names
                    kernel = eval(name, vars(loaded))
                    if isinstance(kernel, KernelInterface):
                        found[f"{module.name}.{name}"] = kernel
    return found


def launched(kernel: Any, current: list[int], *arguments: Any, **named: Any) -> tuple[int, bool]:
    """The device that is current when a kernel is launched with these arguments; and its fusion."""
    seen = []

    def run(*_: Any, grid: Any, warmup: bool, enable_fp_fusion: bool, **__: Any) -> None:
        seen.append((current[-1], enable_fp_fusion))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "run", run, raising=False)
        kernel[(1,)](*arguments, **named)
    assert current == [0]
    return seen[0]


def test_every_kernel_is_launched_on_its_device(current: list[int]) -> None:
    every = kernels()
    assert len(every) > 50
    found = {name: launched(each, current, FakeTensor(1)) for name, each in every.items()}
    # Fusion of products and sums is stated, too: Triton's default differs between releases.
    assert {name for name, how in found.items() if how != (1, True)} == set()


@pytest.mark.parametrize(
    ("arguments", "named", "device"),
    [
        ((FakeTensor(0), 5), {}, 0),
        ((FakeTensor(3), FakeTensor(0)), {"BLOCK": 1}, 3),
        ((), {"x": FakeTensor(2), "BLOCK": 1}, 2),
        ((Descriptor(FakeTensor(1)),), {}, 1),
        ((torch.zeros(1),), {}, 0),
    ],
)
def test_the_first_argument_selects_the_device(
    arguments: Any, named: Any, device: int, current: list[int]
) -> None:
    class Kernel(KernelInterface):  # type: ignore[misc]
        pass

    kernel = launch_device.on_its_device(Kernel())
    assert isinstance(kernel, Kernel)
    assert launched(kernel, current, *arguments, **named) == (device, True)
    assert not launched(kernel, current, *arguments, **named, enable_fp_fusion=False)[1]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_the_second_gpu_while_the_first_is_current() -> None:
    from cppmega.ops.pointwise.hadamard import walsh_hadamard

    x = torch.randn(8, 64, device="cuda:1", dtype=torch.bfloat16, requires_grad=True)
    with torch.cuda.device(0):
        out = walsh_hadamard(x)
        out.sum().backward()
    torch.testing.assert_close(walsh_hadamard(x.detach().cpu()), out.detach().cpu())
