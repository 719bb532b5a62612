"""Preflight of the GPUs: each check broken, and each healthy."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from cppmega.host import gpus
from cppmega.host.gpus import Gpu
from cppmega.preflight.context import gpu_here
from cppmega.preflight.messages import Device, DevicesAnswer, DevicesOrder
from cppmega.preflight.workers import devices as devices_worker
from tests.preflight.contexts import (
    GB10,
    GIB,
    H200,
    SLICE,
    SMOKE,
    holds,
    launch,
    on,
    refuses,
    says_nothing,
)
from tests.support import patched

pytestmark = pytest.mark.slow


def test_a_machine_without_a_gpu() -> None:
    found = refuses("gpus", "no-gpu", launch(SLICE))
    assert "cppmega recipes" in found.next and "takes 1 GPU, and" in found.what
    for name in ("gpus", "gpu_memory", "kernels", "shared_memory_flag"):
        assert "CPU" in says_nothing(name, launch(SMOKE))
    says_nothing("gpus", launch())
    says_nothing("gpu_memory", launch(SMOKE))


def test_gpus() -> None:
    assert holds("gpus", on(H200)) == "1 x NVIDIA H200 (sm_90, 140.0 GiB)"
    two = SLICE.with_(gpus=2, global_batch_size=2)
    hidden = on(H200, recipe=two, environ={"CUDA_VISIBLE_DEVICES": "0"})
    said = refuses("gpus", "too-few-gpus", hidden).what
    assert "takes 2 GPUs on this host, which has 1 usable one (CUDA_VISIBLE_DEVICES=0)." in said
    holds("gpus", on(H200, recipe=two, nodes=2))
    refuses("gpus", "architecture-differs", on(GB10))
    any_gpu = SLICE.with_(architectures=())
    holds("gpus", on(GB10, recipe=any_gpu))  # from the PTX of compute_120
    old = Device("Tesla V100", (7, 0), 32 * GIB, 32 * GIB)
    refuses("gpus", "architecture-not-built", on(old, recipe=any_gpu))
    refuses("gpus", "unlike-gpus", on(H200, GB10, recipe=any_gpu))


def test_gpus_that_the_driver_warns_of() -> None:
    fine = Gpu("0", "GPU-1", "NVIDIA H200", "143771 MiB")
    holds("gpus", on(H200, reported={"GPU-1": fine}))
    lost = replace(fine, uncorrected_errors=2)
    refuses("gpus", "gpu-damaged", on(H200, reported={"GPU-1": lost}))
    closed = replace(fine, compute_mode="Prohibited")
    refuses("gpus", "gpu-closed", on(H200, reported={"GPU-1": closed}))


def test_what_nvidia_smi_says(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    rows = ["0, GPU-1, NVIDIA H200, 143771 MiB, Default, 2", "1, GPU-2, X, 1 MiB, Default, [N/A]"]
    lines = "".join(f"echo '{row}'\n" for row in (*rows, "No devices were found"))
    program.write_text(f"#!/bin/sh\n{lines}")
    program.chmod(0o755)
    first, second = gpus.reported({"PATH": f"{tmp_path}:/bin:/usr/bin"})
    assert (first.uncorrected_errors, second.uncorrected_errors) == (2, 0)
    assert f"{first.name}, {first.memory}" == "NVIDIA H200, 143771 MiB"  # as run.json has it
    refuses("gpus", "gpu-damaged", on(H200, reported={"GPU-1": first}))
    program.write_text("not a program")
    assert gpus.reported({"PATH": str(tmp_path)}) == []
    assert gpus.reported({"PATH": ""}) == []


@pytest.mark.skipif(gpu_here(), reason="needs a machine without a GPU")
def test_a_driver_that_torch_cannot_use() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": ""}
    asked = launch(SLICE, root=patched("0.19.2"), training_machine=True, environ=environ)
    found = refuses("gpus", "no-gpu", asked)
    assert "torch" in found.what and "CUDA_VISIBLE_DEVICES=''" in found.what


def test_what_torch_says_of_its_gpus_crosses_the_border(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(
        device_count=lambda: 1,
        get_device_properties=lambda index: SimpleNamespace(name="H", major=9, minor=0, uuid="1"),
        mem_get_info=lambda index: (139 * GIB, 140 * GIB),
        get_arch_list=lambda: ["sm_90"],
    )
    version = SimpleNamespace(cuda="13.0")
    torch = SimpleNamespace(version=version, cuda=cuda, zeros=lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    monkeypatch.setattr(devices_worker, "only_from", lambda root: None)
    found = devices_worker.inspect(DevicesOrder(root="/", modules=["json", "no_such_kernel"]))
    assert (
        msgspec.convert(json.loads(json.dumps(msgspec.to_builtins(found))), DevicesAnswer) == found
    )
    (device,) = found.devices
    assert (device.architecture, device.total, device.uuid) == ("sm_90", 140 * GIB, "GPU-1")
    assert found.imports["json"] == "" and "no_such_kernel" in found.imports["no_such_kernel"]


def test_gpus_that_somebody_else_uses() -> None:
    holds("gpu_memory", on(H200))
    taken = Device("NVIDIA H200", (9, 0), 140 * GIB, 60 * GIB)
    assert "80.0 GiB" in refuses("gpu_memory", "gpu-occupied", on(taken)).what


def test_the_model_fits() -> None:
    assert "of 140.0 GiB" in holds("gpu_memory", on(H200))
    small = Device("NVIDIA RTX", (9, 0), 24 * GIB, 24 * GIB)
    assert "activations" in refuses("gpu_memory", "does-not-fit", on(small)).what


@pytest.mark.gpu
def test_this_gpu(tmp_path: Path) -> None:
    context = launch(SLICE.with_(architectures=()), root=patched("0.19.2"), deep=True)
    context.training_machine = True
    found = context.devices
    assert found.found and found.compiled_for and found.imports["triton"] == ""
    assert holds("gpus", context) and holds("gpu_memory", context)
    assert "linear cross-entropy" in holds("kernel_parity", context)
