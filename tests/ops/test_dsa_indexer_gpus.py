"""Every kernel of the indexer fits the shared memory of every GPU, at its largest shape."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch import Tensor  # noqa: E402

from cppmega.ops import dsa_indexer_device as device  # noqa: E402
from cppmega.ops.dsa_indexer import obstacle  # noqa: E402

pytestmark = pytest.mark.slow

LIMITS = {80: 163, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory that a block may have, by architecture; NVIDIA's tuning guides."""

LARGEST = {"_key_kernel", "_query_kernel"}
"""The kernels that more than 99 KiB may make a difference to: they have the largest tiles."""

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.bool: "*i1",
}
OPTIONS = ("num_warps", "num_stages", "maxnreg")


class Recorded:
    """Stands for a kernel and keeps the arguments of its launches."""

    def __init__(self, kernel: Any, launches: list[tuple[Any, dict[str, Any]]]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: object) -> Any:
        def launch(*arguments: object, **named: object) -> None:
            given = dict(zip(self.kernel.arg_names, arguments, strict=False))
            self.launches.append((self.kernel, given | named))

        return launch


def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    """What 128 heads of 128 launch, for all losses and the prologue; the first of each kernel.

    The log-sum-exp is two kernels: over all keys, and over those whose bit is set.
    """
    from cppmega.ops import dsa_indexer_bits_triton as bits
    from cppmega.ops import dsa_indexer_dense_triton as dense
    from cppmega.ops import dsa_indexer_per_head_triton as per_head
    from cppmega.ops import dsa_indexer_prologue_triton as prologue
    from cppmega.ops import dsa_indexer_sparse_triton as sparse
    from cppmega.ops import dsa_indexer_tiles_triton as tiles
    from cppmega.ops import dsa_indexer_topk_triton as topk
    from cppmega.ops.dsa_indexer_autograd import Call, indexer_loss_on_cuda
    from cppmega.ops.dsa_indexer_problem import Bounds, Loss
    from cppmega.ops.dsa_indexer_prologue import Rotary

    found: list[tuple[Any, dict[str, Any]]] = []
    for module in (bits, dense, per_head, prologue, sparse, tiles, topk):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Recorded(getattr(module, name), found))

    def made(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    rows, keys = 16, 2048
    q, k, w = made(rows, 1, 128, 128).requires_grad_(), made(keys, 1, 128), made(rows, 1, 128)
    bounds = Bounds(torch.zeros(rows, dtype=torch.int32), torch.full((rows,), keys))
    for is_sparse, width, key_heads in ((True, 576, 1), (False, 128, 128), (True, 128, 128)):
        loss = Loss(softmax_scale=1.0, coefficient=1.0, sparse=is_sparse, repeatable=False)
        attention = made(rows, 1, 128, width), made(keys, 1, key_heads, width)
        call = Call(keys, loss, bounds, torch.ones(1, rows, dtype=torch.bool), True)
        indexer_loss_on_cuda(q, k, w, *attention, call)
    rotary = Rotary(angles=torch.zeros(rows, 1, 1, 64))
    prologue.turn(q, k[:rows], w, rotary, True, 1.0, backward=True)
    return list({name_of(*launch): launch for launch in reversed(found)}.values())


def name_of(kernel: Any, given: dict[str, Any]) -> str:
    """The name of a kernel, as compiled for a launch."""
    return f"{kernel.__name__}{' of chosen keys' if given.get('CHOSEN') else ''}"


def source_of(kernel: Any, given: dict[str, Any]) -> Any:
    """A kernel specialized for its arguments as Triton does it at a launch."""
    from triton.compiler import ASTSource

    signature: dict[str, str] = {}
    fixed: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for at, (name, parameter) in enumerate(zip(kernel.arg_names, kernel.params, strict=True)):
        value, is_tensor = given[name], isinstance(given[name], Tensor)
        if parameter.is_constexpr or (not is_tensor and value == 1):
            signature[name], fixed[(at,)] = "constexpr", value
            continue
        other = "fp32" if isinstance(value, float) else "i32"
        signature[name] = TYPES[value.dtype] if is_tensor else other
        if is_tensor or (other == "i32" and value % 16 == 0):
            attributes[(at,)] = [["tt.divisibility", 16]]
    return ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=attributes)


def shared_memory(kernel: Any, given: dict[str, Any], arch: int) -> int:
    """Bytes of shared memory, after Triton's passes and before its assembler."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    options = backend.parse_options({name: given[name] for name in OPTIONS if name in given})
    context, stages = ir.context(), {}
    ir.load_dialects(context)
    backend.load_dialects(context)
    source, functions = source_of(kernel, given), backend.get_codegen_implementation(options)
    module = source.make_ir(target, options, functions, backend.get_module_map(), context)
    backend.add_stages(stages, options, source.language)
    metadata = {"target": target, **vars(options)}
    for stage in ("ttir", "ttgir", "llir"):
        module = stages[stage](module, metadata)
    return int(metadata["shared"])


@pytest.mark.parametrize("arch", LIMITS)
def test_shared_memory_of_every_kernel(arch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = LIMITS[arch] * 1024
    gpu = device.Gpu((arch // 10, arch % 10), limit)
    for module in ("dsa_indexer_sparse_triton", "dsa_indexer_tiles_triton"):
        monkeypatch.setattr(f"cppmega.ops.{module}.gpu_of", lambda _: gpu)
    taken = {
        name_of(kernel, given): shared_memory(kernel, given, arch)
        for kernel, given in launches(monkeypatch)
        if limit == device.LEAST_SHARED or kernel.__name__ in LARGEST
    }
    assert len(taken) == (11 if limit == device.LEAST_SHARED else len(LARGEST))
    assert {name: bytes_ for name, bytes_ in taken.items() if bytes_ > limit} == {}


def test_a_gpu_with_less_is_declined_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def gpu(major: int, minor: int, shared: int) -> None:
        found = SimpleNamespace(major=major, minor=minor, shared_memory_per_block_optin=shared)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
        device.gpu_of.cache_clear()

    q = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16, size=lambda at: 64)
    gpu(7, 5, 64 * 1024)
    assert obstacle(q, q) == "sm_75 gives a block 64 KiB of shared memory, not 99"  # type: ignore[arg-type]
    gpu(12, 1, 99 * 1024)
    assert obstacle(q, q) is None  # type: ignore[arg-type]
    # As files ask that were patched when 64 key heads were an obstacle.
    assert obstacle(q, q, q) is None  # type: ignore[arg-type]
    device.gpu_of.cache_clear()
