"""Counts launches on CPU: kernels by recorders, torch's operators by dispatch."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

FREE = re.compile(
    "alias|as_strided|detach|(new_)?empty(_like|_strided)?|expand|permute|select|slice|split|"
    "squeeze|t|transpose|unbind|unsqueeze|_?(unsafe_)?view"
)
"""Operators of torch that launch nothing."""
TWICE = frozenset({"sum", "mean", "amax", "max", "cumsum"})
"""Reductions: a large one clears its semaphores first."""


class Launches(TorchDispatchMode):  # type: ignore[misc]
    """Counts the launches of kernels and of torch's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def recorder(self, name: str) -> Any:
        """What stands for a Triton kernel."""
        names = self.names

        class Recorder:
            def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
                assert all(0 < size < 2**31 for size in grid) and all(
                    size < 2**16 for size in grid[1:]
                ), f"CUDA refuses the grid {grid} of {name}"
                return lambda *arguments, **options: names.append(name)

        return Recorder()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not FREE.fullmatch(name):
            self.names += [name] * (2 if name in TWICE else 1)
        return func(*args, **(kwargs or {}))

    def taken(self) -> list[str]:
        """The names since the last call."""
        names, self.names[:] = list(self.names), []
        return names


def modules_of(family: str, prefix: str = "") -> list[ModuleType]:
    """The modules of a family's Triton kernels; those whose names begin with `prefix`."""
    package = importlib.import_module(f"cppmega.ops.{family}")
    return [
        importlib.import_module(f"{package.__name__}.{found.name}")
        for found in pkgutil.iter_modules(package.__path__)
        if found.name.startswith(prefix) and found.name.endswith("_triton")
    ]


def kernels_of(module: ModuleType) -> list[str]:
    """The names of a module's kernels."""
    return [name for name in vars(module) if name.endswith("_kernel")]
