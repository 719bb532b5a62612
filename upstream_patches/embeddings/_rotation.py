"""Which models MLA's pages of RoPE are for, and what their proofs compute in its kernel's place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cppmega.catalogue.megatron_args import has_mla


def rotates(args: Any) -> bool:
    """Whether the model has MLA whose RoPE Megatron does not fuse, in MLA's order of columns."""
    others = any(getattr(args, name, False) for name in ("apply_rope_fusion", "rotary_interleaved"))
    return has_mla(args) and not others


def rotating(launched: list[str]) -> Callable[..., None]:
    """A stand-in for `rope_triton.rotate`, by its reference.

    Args:
        launched: takes "forward" or "backward" at each call.
    """
    import torch

    from cppmega.ops.pointwise import rope_naive as rope_reference

    def rotate(given: Any, cos: Any, sin: Any, out: Any, *how: Any) -> None:
        assert given.stride(-1) == 1 and out.is_contiguous()
        *how, backward = how
        launched.append("backward" if backward else "forward")
        with torch.enable_grad():
            turned = given.detach().requires_grad_()
            result = rope_reference.rotated(turned, torch.atan2(sin, cos), *how)
        out.copy_(torch.autograd.grad(result, turned, given)[0] if backward else result)

    return rotate
