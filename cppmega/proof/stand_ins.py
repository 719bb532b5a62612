"""Stand-ins for the parts of a training run that a proof on a CPU does without.

Pages import them inside `verify()`, and tests anywhere. What these functions put into `sys.modules`
stays until the process ends: every proof has its own process.

Example:
    >>> def verify() -> None:
    ...     from cppmega.proof import stand_ins
    ...
    ...     tilelang = stand_ins.tilelang()
    ...     import my_kernels
    ...
    ...     (kernel,) = tilelang.kernels
    ...     assert kernel.options["pass_configs"] == {"TL_ENABLE_FAST_MATH": True}
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock


class Arguments(SimpleNamespace):
    """Megatron's arguments, or a configuration: attributes that are not given have the unset value.

    Args:
        unset: the value of all others; 0 for code that computes with them.
        given: the attributes by name.

    Example:
        >>> args = Arguments(num_layers=2)
        >>> args.num_layers, args.fp8
        (2, None)
    """

    def __init__(self, unset: object = None, **given: Any) -> None:
        super().__init__(**given)
        self.__dict__["_unset"] = unset

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle look up methods that must not exist
            raise AttributeError(name)
        return self.__dict__["_unset"]


@contextlib.contextmanager
def on_gpu(kernels: str, **launches: Callable[..., Any]) -> Iterator[None]:
    """Let tensors count as a GPU's, and compute in torch what kernels of `cppmega.ops` are for.

    What decides on a call, and all that surrounds the launches, is the real code.

    Args:
        kernels: the module that launches them, such as `pointwise.rope_triton`.
        launches: its functions by name, with their replacements.
    """
    import torch

    if importlib.util.find_spec("triton") is None:
        module("triton")
    launcher = SimpleNamespace(**launches)
    family, _, name = f"cppmega.ops.{kernels}".rpartition(".")
    with (
        mock.patch.dict(sys.modules, {f"{family}.{name}": launcher}),
        mock.patch.object(importlib.import_module(family), name, launcher, create=True),
        mock.patch.object(torch.Tensor, "is_cuda", True),
    ):
        yield


@contextlib.contextmanager
def quiet_training(training: ModuleType, args: Any, **replaced: Any) -> Iterator[None]:
    """Make `training_log` of a `megatron.training.training` run without loggers and timers.

    Args:
        training: the module, patched or not.
        args: what its `get_args` returns.
        replaced: other names of the module, with their replacements.
    """
    absent = ("timers", "tensorboard_writer", "wandb_writer", "one_logger", "energy_monitor")
    names: dict[str, Any] = {f"get_{name}": lambda: None for name in absent}
    names |= {"get_args": lambda: args, "get_num_microbatches": lambda: 1}
    with mock.patch.multiple(training, **(names | replaced)):
        yield


@dataclass(frozen=True)
class Kernel:
    """A kernel that was built with `tilelang.jit`."""

    name: str
    module: str
    options: dict[str, Any]
    """The keyword arguments of `jit`."""


@dataclass
class TileLang:
    """A `tilelang` that compiles nothing and records which kernels are built, and how.

    Names of `tilelang.PassConfigKey` are strings here.
    """

    kernels: list[Kernel] = field(default_factory=list)

    def jit(self, function: Callable[..., Any] | None = None, **options: Any) -> Any:
        """Record a kernel, with or without options, and return its function as it is."""

        def build(kernel: Callable[..., Any]) -> Callable[..., Any]:
            self.kernels.append(Kernel(kernel.__name__, kernel.__module__, options))
            return kernel

        return build if function is None else build(function)


def tilelang() -> TileLang:
    """Install a TileLang that records its kernels; the real one needs the driver of a GPU."""
    recording = TileLang()
    top = module("tilelang", jit=recording.jit, PassConfigKey=_Names())
    top.language = module("tilelang.language", prim_func=_same)
    top.profiler = module("tilelang.profiler")
    top.autotuner = module("tilelang.autotuner", autotune=lambda *_, **__: _same)
    return recording


class _Names:
    """An enumeration whose every member is its own name."""

    def __getattr__(self, name: str) -> str:
        return name


def _same(function: Any) -> Any:
    return function


def module(name: str, **attributes: Any) -> Any:
    """Install a module that has every attribute, for an import that cannot succeed here."""
    spec = ModuleSpec(name, None)
    sys.modules[name] = mock.MagicMock(__path__=[], __spec__=spec, **attributes)
    return sys.modules[name]


def package(name: str, folder: str) -> None:
    """Install a package whose modules are in a folder, without running its `__init__`."""
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__path__ = [folder]


def forget(name: str) -> None:
    """Drop a package and its modules, so that the next import sees the stand-ins."""
    for imported in [other for other in sys.modules if f"{other}.".startswith(f"{name}.")]:
        del sys.modules[imported]
