"""GPU memory that the private pools of CUDA graphs reserve, which a peak of allocations leaves out.

A graph replays on the addresses of its capture, so the allocator keeps the memory of a capture in a
pool apart, which only graphs use. Its segments stay reserved as a whole, whether tensors hold them
or not, and the peak of allocated memory counts tensors only. Those that are alive in a pool are in
both numbers, so the two must not be added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

_DEFAULT = (0, 0)
"""Id of the pool that everything outside of captures is allocated from."""


def reserved_gib(segments: Iterable[Mapping[str, Any]]) -> float | None:
    """What the segments of all pools but the default one reserve, GiB; None without any.

    Every graph's pool is included, of forward and backward passes, with what is free in it, and so
    is the pool of a graph that is gone until the allocator gives its segments back. A
    `torch.cuda.MemPool`, such as that of NCCL's buffers with `--nccl-ub`, has an id of the same
    form and is included, too. What the driver takes for a graph itself is not.

    Args:
        segments: as `torch.cuda.memory_snapshot` returns them.
    """
    private = [each for each in segments if tuple(each["segment_pool_id"]) != _DEFAULT]
    return sum(each["total_size"] for each in private) / 2**30 if private else None


class GraphPools:
    """The pools of this rank, measured at logged steps until their size has settled.

    A snapshot of a large process takes tens of milliseconds, which do not belong in a timed step.
    So none is taken without graphs, nor after two in a row that found the same size: captures are
    over by then. Where two logged steps before the first capture found the same other pool, its
    size stays the answer.
    """

    def __init__(self, graphs: str, snapshot: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
        """Create it before the first step.

        Args:
            graphs: how CUDA graphs are captured, see `megatron_args.cuda_graphs`.
            snapshot: `torch.cuda.memory_snapshot`.
        """
        self._snapshot = snapshot
        self._settled = graphs == "none"
        self._last: float | None = None

    def gib(self) -> float | None:
        """What they reserve, GiB, see `reserved_gib`; None without any, or without graphs."""
        if not self._settled:
            size = reserved_gib(self._snapshot())
            self._settled = size is not None and size == self._last
            self._last = size
        return self._last
