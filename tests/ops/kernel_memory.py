"""How much shared memory Triton gives a kernel on a GPU that is not here, and what it spills."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
from collections.abc import Iterable
from inspect import getsource
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.ops import memory_record
from tests.ops.launch_counts import kernels_of

LIMITS = {80: 163, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory that a block may have, by architecture; NVIDIA's tuning guides."""

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}
TF32 = re.compile(r"inputPrecision = tf32 : tensor<[\dx]+xf32")
OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")

Launch = tuple[Any, dict[str, Any]]
"""A kernel, and the arguments and options of its launch."""


class Recorded:
    """Stands for a kernel and keeps the arguments of its launches."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: object) -> Any:
        def launch(*arguments: object, **named: object) -> None:
            given = dict(zip(self.kernel.arg_names, arguments, strict=False))
            self.launches.append((self.kernel, given | named))

        return launch


def record(monkeypatch: pytest.MonkeyPatch, modules: Iterable[ModuleType]) -> list[Launch]:
    """The launches of these modules' kernels from here on, none of which runs."""
    found: list[Launch] = []
    for module in modules:
        for name in kernels_of(module):
            monkeypatch.setattr(module, name, Recorded(getattr(module, name), found))
    return found


def source_of(kernel: Any, given: dict[str, Any]) -> Any:
    """A kernel specialized for its arguments as Triton does it at a launch."""
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    signature: dict[str, str] = {}
    fixed: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for at, (name, parameter) in enumerate(zip(kernel.arg_names, kernel.params, strict=True)):
        value, is_tensor = given[name], isinstance(given[name], Tensor)
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            signature[name], fixed[(at,)] = "constexpr", value
            continue
        other = "fp32" if isinstance(value, float) else "i32"
        if hasattr(value, "block_shape"):  # of Triton's or Gluon's, which has a layout too
            layout = f",{value.layout!r}" if hasattr(value, "layout") else ""
            other = f"tensordesc<{TYPES[value.base.dtype][1:]}{list(value.block_shape)}{layout}>"
        signature[name] = TYPES[value.dtype] if is_tensor else other
        if is_tensor or (other == "i32" and value % 16 == 0):
            attributes[(at,)] = [["tt.divisibility", 16]]
    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    return kind(fn=kernel, signature=signature, constexprs=fixed, attrs=attributes)


def shared_memory(kernel: Any, given: dict[str, Any], arch: int) -> int:
    """Bytes of shared memory after Triton's passes: as recorded, or by running these.

    Asserts that no fp32 product is computed in tf32, which no kernel here intends.
    """
    if not hasattr(kernel, "is_gluon"):
        pytest.skip("asks the passes of Triton 3.4 and later")
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    stated = {name: given[name] for name in OPTIONS if name in given}
    options = backend.parse_options({"enable_fp_fusion": True, **stated})  # as `on_its_device`
    context, stages = ir.context(), {}
    ir.load_dialects(context)
    backend.load_dialects(context)
    source, functions = source_of(kernel, given), backend.get_codegen_implementation(options)
    told = options, functions, backend.get_module_map(), context
    if "target" in inspect.signature(source.make_ir).parameters:  # from Triton 3.5 on
        told = target, *told
    module = source.make_ir(*told)
    backend.add_stages(stages, options, source.language)
    metadata = {"target": target, **vars(options)}
    if "ttir" in stages:  # Gluon begins with the second language
        module = stages["ttir"](module, metadata)
    # Triton turns sums of broadcast products into matrix products in tf32.
    assert not TF32.search(str(module)), "multiplies fp32 in tf32"
    # All that the other passes are given, and they take six times as long as the first.
    key = memory_record.key_of(module.str_nodebug(), options.hash(), arch, getsource(_lowered))
    family = kernel.fn.__module__.removeprefix("cppmega.ops.")
    name = f"{family}.{kernel.__name__}" if family != kernel.fn.__module__ else kernel.__name__

    def compiled() -> int:
        if not memory_record.assembles():
            return _lowered(module, stages, metadata)
        log = _assembled(module, stages, metadata)
        memory_record.note(arch, name, log)
        return int(metadata["shared"])

    return memory_record.known(key, arch, compiled, name)


def check_fits(
    found: Iterable[Launch], modules: Iterable[ModuleType], archs: Iterable[int] = LIMITS
) -> None:
    """Assert that every kernel of the modules was launched, and that each launch fits."""
    found = list(found)
    launched = {kernel.__name__ for kernel, _ in found}
    every = {name for module in modules for name in kernels_of(module)}
    assert launched == every, f"not launched: {every - launched}; unknown: {launched - every}"
    for kernel, given in found:
        for arch in archs:
            taken = shared_memory(kernel, given, arch)
            assert taken <= LIMITS[arch] << 10, f"{kernel.__name__} takes {taken} on sm_{arch}"


def _lowered(module: Any, stages: dict[str, Any], metadata: dict[str, Any]) -> int:
    """The bytes that the later passes find; LLVM's do not change them and are skipped."""
    from triton._C.libtriton import llvm

    with mock.patch.multiple(llvm, optimize_module=mock.DEFAULT, link_extern_libs=mock.DEFAULT):
        for stage in ("ttgir", "llir"):
            module = stages[stage](module, metadata)
    return int(metadata["shared"])


def _assembled(module: Any, stages: dict[str, Any], metadata: dict[str, Any]) -> str:
    """What NVIDIA's assembler, which Triton brings, says of the kernel: registers and spills."""
    from triton import knobs

    with contextlib.redirect_stdout(io.StringIO()) as said:
        knobs.nvidia.dump_ptxas_log = True
        try:
            for stage in ("ttgir", "llir", "ptx", "cubin"):
                module = stages[stage](module, metadata)
        finally:
            knobs.nvidia.dump_ptxas_log = False
    return said.getvalue()
