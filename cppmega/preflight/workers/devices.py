"""List the GPUs for the preflight; started by `cppmega.preflight.devices`."""

from __future__ import annotations

import importlib
from pathlib import Path

from cppmega.guard.files import only_from
from cppmega.preflight.ask import serve
from cppmega.preflight.messages import Device, DevicesAnswer, DevicesOrder


def inspect(order: DevicesOrder) -> DevicesAnswer:
    """The GPUs that torch can use, and the modules that cannot be imported on them."""
    import torch

    if torch.version.cuda is None:
        return DevicesAnswer(why=f"the installed torch {torch.__version__} is built without CUDA")
    try:
        torch.zeros(1, device="cuda")
    except (RuntimeError, AssertionError) as error:
        return DevicesAnswer(why=f"torch cannot use one: {error}".strip().rstrip("."))
    devices = tuple(_device(index) for index in range(torch.cuda.device_count()))
    only_from(Path(order.root))
    imports = {module: _import_error(module) for module in order.modules}
    compiled_for = tuple(torch.cuda.get_arch_list())
    return DevicesAnswer(devices=devices, compiled_for=compiled_for, imports=imports)


def _device(index: int) -> Device:
    import torch

    one = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    uuid = f"GPU-{getattr(one, 'uuid', '')}"
    return Device(one.name, (one.major, one.minor), total, free, uuid)


def _import_error(module: str) -> str:
    """Why a module cannot be imported; empty where it can."""
    try:
        importlib.import_module(module)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:500]
    return ""


if __name__ == "__main__":
    serve(DevicesOrder, inspect)
