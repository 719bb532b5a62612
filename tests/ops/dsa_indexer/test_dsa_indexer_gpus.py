"""Every kernel of the indexer fits the shared memory of every GPU, at its largest shape."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch import Tensor  # noqa: E402

from cppmega.ops.common import device  # noqa: E402
from cppmega.ops.dsa_indexer import obstacle  # noqa: E402
from tests.ops.kernel_memory import LIMITS, Launch, record, shared_memory  # noqa: E402

pytestmark = pytest.mark.slow

LARGEST = {"_key_kernel", "_query_kernel"}
"""The kernels that more than 99 KiB may make a difference to: they have the largest tiles."""


def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What 128 heads of 128 launch, for all losses and the prologue; the first of each kernel.

    The log-sum-exp is two kernels: over all keys, and over those whose bit is set.
    """
    from cppmega.ops.common import bits_triton as bits
    from cppmega.ops.common.bounds import Bounds
    from cppmega.ops.dsa_indexer import dense_triton as dense
    from cppmega.ops.dsa_indexer import per_head_triton as per_head
    from cppmega.ops.dsa_indexer import sparse_triton as sparse
    from cppmega.ops.dsa_indexer import tiles_triton as tiles
    from cppmega.ops.dsa_indexer import topk_triton as topk
    from cppmega.ops.dsa_indexer.autograd import Call, indexer_loss_on_cuda
    from cppmega.ops.dsa_indexer.problem import Loss
    from cppmega.ops.pointwise import dsa_indexer_prologue_triton as prologue
    from cppmega.ops.pointwise.dsa_indexer_prologue import Rotary

    found = record(monkeypatch, (bits, dense, per_head, prologue, sparse, tiles, topk))

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


@pytest.mark.parametrize("arch", LIMITS)
def test_shared_memory_of_every_kernel(arch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = LIMITS[arch] * 1024
    gpu = device.Gpu((arch // 10, arch % 10), limit)
    for module in ("dsa_indexer.sparse_triton", "dsa_indexer.tiles_triton"):
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
