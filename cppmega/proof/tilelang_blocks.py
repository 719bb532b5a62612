"""Run the body of a TileLang kernel in plain Python, block by block, and record its stores.

TileLang compiles only for GPUs. Its kernels are Python functions, though, so with a stand-in for
`tilelang.language` their loops and assignments run as written; slowly, for tiny shapes.

Example:
    >>> stand_ins.tilelang()
    >>> import my_kernels
    >>> language = Blocks(rows=5)  # the sizes that `T.dynamic` names
    >>> with mock.patch.object(my_kernels, "T", language):
    ...     kernel = my_kernels.build(block=4)
    >>> out = language.recorded(torch.zeros(5))
    >>> language.run(kernel, out)
    >>> assert all(out.stores[row] == ["parallel"] for row in range(5))
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


class Recorded:
    """A tensor in device memory that records each store into it."""

    def __init__(self, values: Tensor, language: Blocks) -> None:
        self.values = values
        self.stores: dict[Any, list[str]] = defaultdict(list)
        """By index: `parallel` if one thread stores, `all threads` if all of a block do."""
        self._language = language

    def __setitem__(self, index: Any, value: Any) -> None:
        place = tuple(map(int, index)) if isinstance(index, tuple) else int(index)
        self.stores[place].append("parallel" if self._language.parallel else "all threads")
        self.values[index] = value


class Blocks:
    """The part of `tilelang.language` that the kernels under test use.

    Args:
        sizes: the dynamic sizes by name.
    """

    bfloat16, float32, int32 = torch.bfloat16, torch.float32, torch.int32
    min, max = staticmethod(min), staticmethod(max)

    def __init__(self, **sizes: int) -> None:
        self.parallel = 0
        self._sizes = sizes
        self._block = 0
        self._count = 1

    def __getattr__(self, name: str) -> Any:
        return _Nothing()

    def recorded(self, values: Tensor) -> Recorded:
        """Record the stores into an argument of a kernel."""
        return Recorded(values, self)

    def run(self, kernel: Callable[..., Any], *arguments: Any) -> None:
        """Run every block of the kernel's grid, one after the other."""
        self._block = 0
        while self._block < self._count:
            kernel(*arguments)
            self._block += 1

    def dynamic(self, name: str) -> int:
        """The size of this name."""
        return self._sizes[name]

    @staticmethod
    def prim_func(function: Any) -> Any:
        """The function as it is."""
        return function

    @contextlib.contextmanager
    def Kernel(self, blocks: int, *, threads: int) -> Iterator[int]:  # noqa: N802
        """Yield the number of the block that runs."""
        self._count = blocks
        yield self._block

    def Parallel(self, *sizes: int) -> Iterator[Any]:  # noqa: N802
        """Yield the iterations of a loop that the threads share."""
        self.parallel += 1
        for at in itertools.product(*map(range, sizes)):
            yield at if len(sizes) > 1 else at[0]
        self.parallel -= 1

    @staticmethod
    def serial(size: int) -> range:
        """The iterations of a loop that every thread runs."""
        return range(size)

    @staticmethod
    def Pipelined(size: int, num_stages: int = 1) -> range:  # noqa: N802
        """Like `serial`: stages change the timing, not the result."""
        return range(size)

    @staticmethod
    def alloc_shared(shape: list[int], dtype: Any) -> Tensor:
        """Shared memory of a block, in fp32."""
        return torch.zeros(shape)

    alloc_fragment = alloc_shared

    @staticmethod
    def reshape(x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A view."""
        return x.view(shape)

    @staticmethod
    def ceildiv(a: int, b: int) -> int:
        """a / b, rounded up."""
        return -(-a // b)

    @staticmethod
    def if_then_else(condition: Any, yes: Any, no: Any) -> Any:
        """One of two values; both are computed."""
        return yes if condition else no

    @staticmethod
    def gemm(a: Tensor, b: Tensor, out: Tensor, *, transpose_B: bool, **how: Any) -> None:  # noqa: N803
        """Multiply two tiles."""
        out.copy_(a @ (b.T if transpose_B else b))

    @staticmethod
    def reduce_sum(x: Tensor, out: Tensor, dim: int, clear: bool) -> None:
        """Sum over one dimension."""
        out.copy_(x.sum(dim) + (0 if clear else out))


class _Nothing:
    """A type or a policy, which has no effect here: it has every attribute and can be called."""

    def __getattr__(self, name: str) -> _Nothing:
        return self

    def __call__(self, *arguments: Any, **named: Any) -> _Nothing:
        return self
