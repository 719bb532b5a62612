"""Ask the mHC kernels for the reason why they cannot run, in a process that may import torch."""

from __future__ import annotations

from cppmega.preflight.ask import serve
from cppmega.preflight.messages import ConnectionsAnswer, ConnectionsOrder


def inspect(order: ConnectionsOrder) -> ConnectionsAnswer:
    """The reason that the ops themselves report when a model is built."""
    import torch

    from cppmega.ops import mhc

    dtype: torch.dtype = getattr(torch, order.dtype)
    device = torch.device(order.device)
    return ConnectionsAnswer(reason=mhc.obstacle(device, dtype, order.streams, order.width))


if __name__ == "__main__":
    serve(ConnectionsOrder, inspect)
