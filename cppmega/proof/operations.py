"""`counted()`: how often code calls each of PyTorch's operators, below autograd.

Example:
    >>> with counted() as calls:
    ...     torch.ones(3).add(1).add(2)
    >>> calls["add"]
    2
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count calls by the operator's name, without namespace and overload."""
    calls: Counter[str] = Counter()
    with _Counting(calls):
        yield calls


class _Counting(TorchDispatchMode):
    def __init__(self, calls: Counter[str]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.calls[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))
