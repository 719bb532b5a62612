"""`no_host_sync()`: fails where code asks the device for a value, on a machine without a device.

Whatever makes the host wait for a GPU (`.item()`, `if tensor`, `nonzero`, a mask as index...) also
breaks a CUDA graph capture. On CPU these calls succeed in silence, so they are caught by name: as
operators where they reach the dispatcher, as functions where they do not (`tolist`, `numpy`, and
`torch.tensor`, whose copy from pageable host memory waits as well).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

OPERATORS = frozenset(
    f"aten::{name}"
    for name in (
        "_local_scalar_dense",  # item, bool, int, float, a tensor as slice bound
        "equal",
        "allclose",
        "nonzero",  # argwhere, where(condition)
        "masked_select",
        "_unique",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "unique_dim_consecutive",
        "bincount",
    )
)
"""Their result, or its size, is a value of the device."""

FUNCTIONS = frozenset(
    {
        torch.Tensor.tolist,
        torch.Tensor.numpy,
        torch.Tensor.cpu,
        torch.Tensor.__array__,
        torch.Tensor.new_tensor,
        torch.tensor,
        torch.as_tensor,
        torch.from_numpy,
    }
)
"""They copy between the host and the device, and a CPU tensor does not show it."""


class HostSyncError(AssertionError):
    """The code would have waited for the device."""


@contextlib.contextmanager
def no_host_sync() -> Iterator[None]:
    """Raise `HostSyncError` at the first call inside that would wait for the device."""
    with _Functions(), _Operators():
        yield


class _Functions(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in FUNCTIONS:
            raise HostSyncError(f"{func.__name__} copies between the host and the device")
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if (
            name in OPERATORS
            or (name == "aten::repeat_interleave" and _size_unknown(args, kwargs))
            or (name == "aten::index" and _has_mask(args[1]))
            or (name.startswith("aten::index_put") and _has_mask(args[1]) and args[2].numel() > 1)
        ):
            raise HostSyncError(f"{func} waits for the device")
        return func(*args, **kwargs)


def _size_unknown(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """`repeat_interleave` with a tensor of counts must sum them up unless it is told the result."""
    counts = any(isinstance(argument, torch.Tensor) for argument in (*args[1:], *kwargs.values()))
    return (counts or len(args) == 1) and kwargs.get("output_size") is None


def _has_mask(indices: Any) -> bool:
    """A mask as index needs the number of its true values; one value for all of them does not."""
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
