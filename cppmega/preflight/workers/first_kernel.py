"""Run Mamba-3's TileLang kernel as the first kernel that a process compiles.

The shape is that of the report: 35 tokens and four ranks. TileLang's cache is another folder, so
that the kernel is compiled here.
"""

from __future__ import annotations

from math import isfinite

from cppmega.preflight.ask import serve
from cppmega.preflight.messages import FirstKernelAnswer, FirstKernelOrder

_TOKENS, _WIDTH = 35, 256


def inspect(order: FirstKernelOrder) -> FirstKernelAnswer:
    """Compute one layer and inspect its largest value."""
    import torch

    try:
        from mamba_ssm.modules.mamba3 import Mamba3
    except ImportError as error:
        return FirstKernelAnswer(missing=f"{type(error).__name__}: {error}"[:300])
    torch.manual_seed(0)
    layer = Mamba3(
        d_model=_WIDTH,
        is_mimo=True,
        mimo_rank=4,
        chunk_size=16,
        device=order.device,
        dtype=torch.bfloat16,
    )
    tokens = torch.randn(1, _TOKENS, _WIDTH, device=order.device, dtype=torch.bfloat16)
    largest = float(layer(tokens).abs().max())
    return FirstKernelAnswer(largest=largest if isfinite(largest) else None)


if __name__ == "__main__":
    serve(FirstKernelOrder, inspect)
