"""Every kernel of the sparse attention fits every GPU's shared memory, at its largest shape."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from cppmega.ops.common import bits_triton as common_bits  # noqa: E402
from cppmega.ops.common.device import LEAST_SHARED, Gpu  # noqa: E402
from cppmega.ops.dsa_attention import (  # noqa: E402
    backward_triton,
    bits_triton,
    forward_triton,
    order_triton,
    per_head_triton,
    problem,
    wide_backward_triton,
    wide_triton,
)
from cppmega.ops.dsa_attention.autograd import absorbed  # noqa: E402
from cppmega.ops.dsa_attention.per_head import per_head  # noqa: E402
from cppmega.ops.dsa_attention.problem import Absorbed  # noqa: E402
from tests.ops.kernel_memory import LIMITS, Launch, record, shared_memory  # noqa: E402
from tests.ops.launch_counts import kernels_of  # noqa: E402

pytestmark = pytest.mark.slow

CHOOSING = (per_head_triton, problem)
"""The modules that ask for the GPU to choose their tiles."""
MODULES = (
    backward_triton,
    bits_triton,
    forward_triton,
    order_triton,
    per_head_triton,
    wide_backward_triton,
    wide_triton,
    common_bits,
)
SMALL = {"_bits_kernel", "_lists_kernel", "_count_kernel", "_sum_kernel", "_shared_kernel"}
"""Kernels without a product: they take at most 2 KiB, and the tiles of no GPU change that."""


class Call(NamedTuple):
    """The widths of a call: latent and rotary parts, or of keys and values per head."""

    widths: tuple[int, int]
    per_head: bool = False


LATENT = [Call((64, 64)), Call((512, 64))]
LARGEST = {
    80: [*LATENT, Call((256, 128), per_head=True)],
    90: [
        Call((128, 128)),
        Call((512, 64)),
        Call((256, 128), per_head=True),
        Call((256, 256), per_head=True),
    ],
    100: [*LATENT, Call((256, 128), per_head=True)],
    120: [*LATENT, Call((256, 128), per_head=True)],
}
"""The calls that take most, of all widths; a key for all is that of 128 heads and 2048 keys.

Parts of 64 have larger tiles than parts of 128, which only on sm_90 take more nevertheless.
"""
IN_ORDER = {90, 120}
"""Where the deterministic backward is compiled as well: sm_80 and sm_100 have tiles of sm_120."""


def attend(call: Call, repeatable: bool) -> None:
    """Launch the kernels of a call, and of its backward."""
    like: dict[str, Any] = {"dtype": torch.bfloat16, "requires_grad": True}
    first, second = call.widths
    if call.per_head:
        query, key = (torch.zeros(256, 2, 4, first, **like) for _ in range(2))
        value = torch.zeros(256, 2, 1, second, **like)
        indices = torch.zeros(2, 256, 256, dtype=torch.int32)
        out = per_head(query, key, value, indices, 0.1, None, None)
    else:
        query, key = (torch.zeros(2, 1, heads, first + second, **like) for heads in (128, 1))
        indices = torch.zeros(1, 2, 2048, dtype=torch.int32)
        out = absorbed(Absorbed(query, key, first, indices, 0.1), repeatable=repeatable)
    out.backward(torch.zeros_like(out))


def name_of(kernel: Any) -> str:
    """A kernel and its module: several have one of the same name."""
    return f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__}"


def compiled_for(launch: Launch) -> tuple[object, ...]:
    """What two launches of the same code have in common."""
    kernel, given = launch
    fixed = {name: x for name, x in given.items() if not isinstance(x, torch.Tensor)}
    return name_of(kernel), *fixed.items()


@pytest.mark.parametrize("arch", LIMITS)
def test_shared_memory_of_every_kernel(arch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = LIMITS[arch] << 10
    for module in CHOOSING:
        monkeypatch.setattr(module, "gpu_of", lambda _: Gpu((arch // 10, arch % 10), limit))
    kernels = {name for module in MODULES for name in kernels_of(module)}
    found = record(monkeypatch, MODULES)
    for call in LARGEST[arch]:
        attend(call, repeatable=False)
        if arch in IN_ORDER and not call.per_head:
            attend(call, repeatable=True)
    different = {compiled_for(one): one for one in found if one[1].get("FIRST", 0) == 0}
    small = SMALL if limit > LEAST_SHARED else set()
    taken: dict[str, int] = {}
    for kernel, given in different.values():
        if kernel.__name__ not in small:
            bytes_ = shared_memory(kernel, given, arch)
            taken[name_of(kernel)] = max(bytes_, taken.get(name_of(kernel), 0))
    assert {name.rpartition(".")[2] for name in taken} == kernels - small
    assert {name: bytes_ for name, bytes_ in taken.items() if bytes_ > limit} == {}
