"""Parameters that stay in fp32 when the model is converted to another type."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def keep_fp32(module: torch.nn.Module, config: Any, names: Sequence[str]) -> None:
    """Keep parameters of a module in fp32 through every later conversion.

    `stock_dtype` is the attribute by which the page float16_keep_fp32 lets the optimizers save such
    a parameter among those of the model's own type.
    """
    for name in names:
        if config.bf16 or config.fp16:
            getattr(module, name).stock_dtype = torch.float16 if config.fp16 else torch.bfloat16
    vars(module)["kept_in_fp32"] = tuple(names)
    module._apply = types.MethodType(_apply, module)  # type: ignore[method-assign]


def _apply(self: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> torch.nn.Module:
    """Apply `fn` like `torch.nn.Module._apply`, without rounding the parameters kept in fp32."""
    kept = [self._parameters[name] for name in self.kept_in_fp32]
    tensors = [t for p in kept if p is not None for t in (p, p.grad) if t is not None]

    def convert(tensor: Tensor) -> Tensor:
        new = fn(tensor)
        if new.dtype in (torch.float16, torch.bfloat16) and any(tensor is t for t in tensors):
            return tensor.to(new.device)
        return new

    moved: torch.nn.Module = type(self)._apply(self, convert, recurse)
    return moved
