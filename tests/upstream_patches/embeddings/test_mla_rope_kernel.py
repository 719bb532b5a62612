"""The kernel's reference is stock's rotary embedding to the bit, and patched code calls the kernel.

`tests/ops/pointwise/test_rope.py` compares the kernel with its reference.
"""

from __future__ import annotations

import inspect
import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from tests.upstream_patches import one_process

torch = pytest.importorskip("torch")

PAGE = "mla_rope_kernel"


@pytest.mark.megatron
@pytest.mark.parametrize("version", one_process.PAGES[PAGE])
def test_rope(version: str) -> None:
    one_process.assert_passes(PAGE, version)


def check(stock: one_process.Stock) -> None:
    from megatron.core.models.common.embeddings import rope_utils as patched

    from cppmega.ops.pointwise import rope
    from cppmega.ops.pointwise import rope_naive as rope_reference
    from tests.ops.pointwise.rope_checks import WAYS

    unpatched = stock.module("megatron.core.models.common.embeddings.rope_utils")
    names = inspect.signature(patched.apply_rotary_pos_emb).parameters
    for (adjacent, gathered), dtype, width, scale in itertools.product(
        WAYS, (torch.bfloat16, torch.float32), (8, 6), (1.0, 0.8)
    ):
        config = SimpleNamespace(
            apply_rope_fusion=False,
            rotary_interleaved=adjacent,
            multi_latent_attention=gathered,
            mrope_section=None,
        )
        own = {"mla_rotary_interleaved": gathered} if "mla_rotary_interleaved" in names else {}
        angles = torch.linspace(-40, 40, 5 * width).view(5, 1, 1, width)

        call = {"config": config, "mscale": scale, "cp_group": SimpleNamespace(), **own}
        wanted = outcome(unpatched, dtype, angles, call)
        with one_process.by_reference(rope, "rotated", rope_reference.rotated) as kernel:
            found = outcome(patched, dtype, angles, call)
        assert kernel.call_count == gathered  # a call of another attention stays Megatron's
        if gathered:
            assert kernel.call_args.args[1:] == (angles, adjacent, gathered, scale)
        on_cpu = outcome(patched, dtype, angles, call)
        for mine, expected in zip((*found, *on_cpu), (*wanted, *wanted), strict=True):
            assert torch.equal(mine, expected), (adjacent, gathered, dtype, width, scale)


def outcome(module: Any, dtype: Any, angles: Any, call: dict[str, Any]) -> tuple[Any, Any]:
    """The rotated tensor, and the gradient of what was rotated."""
    drawn = torch.Generator().manual_seed(1)
    t = torch.randn(5, 2, 3, 8, generator=drawn).to(dtype).requires_grad_()
    out = module.apply_rotary_pos_emb(t, angles, **call)
    upstream = torch.randn(out.shape, generator=drawn).to(dtype)
    (gradient,) = torch.autograd.grad(out, t, upstream)
    return out.detach(), gradient
