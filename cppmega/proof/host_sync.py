"""`no_host_sync()`: fails where code asks the device for a value, on a machine without a device.

Whatever makes the host wait for a GPU (`.item()`, `if tensor`, `nonzero`, a mask as index...) also
breaks a CUDA graph capture. Without a GPU such calls are caught by name: as operators where they
reach the dispatcher, as functions where they do not (`tolist`, `numpy`, and `torch.tensor`, whose
copy from pageable host memory waits as well).

By default every tensor is treated as a GPU tensor, so that the results of CPU tensors can be
compared. `no_host_sync("meta")` runs code as on a GPU: meta tensors, which have no values, take the
place of GPU tensors, and CPU tensors belong to the host. It finds copies between the two as well.

Example:
    >>> with no_host_sync():
    ...     torch.ones(3).sum().item()
    Traceback (most recent call last):
    HostSyncError: aten._local_scalar_dense.default waits for the device
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
"""Their result, or its size, depends on values on the device."""

COPIES = frozenset({"aten::_to_copy", "aten::copy_", "aten::_copy_from"})
"""They wait if one side is on the host: only copies of pinned memory do not wait."""

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
"""They copy between the host and the device, which a CPU tensor does not show."""

_TENSOR = torch.tensor
_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]


class HostSyncError(AssertionError):
    """The code would have waited for the device."""


@contextlib.contextmanager
def no_host_sync(device: str | None = None) -> Iterator[None]:
    """Raise `HostSyncError` at the first call inside that would wait for the device.

    Args:
        device: the type of device whose tensors are treated as GPU tensors, such as "meta"; None:
            all.
    """
    with _Functions(device) as functions, _in_backwards(functions), _Operators(device):
        yield


class _Functions(TorchFunctionMode):
    def __init__(self, device: str | None) -> None:
        self.device = device
        super().__init__()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _IS_CUDA and self.device is not None:
            return args[0].device.type == self.device
        nothing = func is _TENSOR and isinstance(args[0], list) and not args[0]
        if func in FUNCTIONS and not nothing and _concerns(self.device, args, kwargs):
            raise HostSyncError(f"{func.__name__} copies between the host and the device")
        return func(*args, **kwargs)


@contextlib.contextmanager
def _in_backwards(mode: TorchFunctionMode) -> Iterator[None]:
    """Also watch custom backward functions, which autograd runs without the mode."""
    released = BackwardCFunction.apply

    def watched(node: Any, *gradients: Any) -> Any:
        with mode:
            return released(node, *gradients)

    with mock.patch.object(BackwardCFunction, "apply", watched):
        yield


class _Operators(TorchDispatchMode):
    def __init__(self, device: str | None) -> None:
        self.device = device
        super().__init__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _waits(func._schema.name, args, kwargs) and _concerns(self.device, args, {}):
            raise HostSyncError(f"{func} waits for the device")
        if func._schema.name in COPIES and _crosses(args, kwargs):
            raise HostSyncError(f"{func} copies between the host and the device")
        return func(*args, **kwargs)


def _concerns(device: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call reads or creates a tensor on the device."""
    if device is None:
        return True
    wanted = torch.device(kwargs.get("device") or "cpu")
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    return wanted.type == device or any(tensor.device.type == device for tensor in tensors)


def _waits(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the host needs a value in order to continue."""
    return (
        name in OPERATORS
        or (name == "aten::repeat_interleave" and _size_unknown(args, kwargs))
        or (name == "aten::index" and _has_mask(args[1]))
        or (name.startswith("aten::index_put") and _has_mask(args[1]) and args[2].numel() > 1)
    )


def _crosses(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call copies values from one device to another."""
    devices = {arg.device.type for arg in args if isinstance(arg, torch.Tensor) and arg.numel()}
    if devices and kwargs.get("device") is not None:
        devices.add(torch.device(kwargs["device"]).type)
    return len(devices) > 1


def _size_unknown(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """`repeat_interleave` with a tensor of counts must sum them unless the output size is given."""
    counts = any(isinstance(argument, torch.Tensor) for argument in (*args[1:], *kwargs.values()))
    return (counts or len(args) == 1) and kwargs.get("output_size") is None


def _has_mask(indices: Any) -> bool:
    """Indexing with a mask needs its number of true values; assigning one value does not."""
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
