"""Transformer Engine's recomputation without its compiled extension, for proofs on a CPU."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any
from unittest import mock

import torch

FILE = "transformer_engine/pytorch/distributed.py"


class Generator(torch.Generator):
    """A generator of masks that shares its state as CUDA's does: a seed, and an offset."""

    def __new__(cls, *_: Any) -> Generator:
        return super().__new__(cls)

    def __init__(self, *state: int) -> None:
        self.state = list(state)

    def manual_seed(self, seed: int) -> Generator:
        self.state[:] = [seed, 0]
        return self

    def graphsafe_get_state(self) -> Generator:
        other = Generator()
        other.state = self.state
        return other

    def graphsafe_set_state(self, other: Any) -> None:
        self.state = other.state

    def get_state(self) -> torch.Tensor:
        return torch.tensor(self.state)

    def set_state(self, state: torch.Tensor) -> None:
        self.state[:] = state.tolist()

    def clone_state(self) -> Generator:
        return Generator(*self.state)

    def mask(self) -> torch.Tensor:
        """Draw: the offset advances in place."""
        self.state[1] += 1
        seed, offset = self.state
        return torch.tensor([1.0, 100.0 * seed, offset])


class _Absent(MetaPathFinder, Loader):
    """Finds every other module of the package: stand-ins, with FP8 turned off."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        ours = name.startswith("transformer_engine") and not name.endswith(".torch_version")
        return ModuleSpec(name, self) if ours else None

    def create_module(self, spec: ModuleSpec) -> Any:
        fp8 = mock.MagicMock(is_fp8_enabled=lambda: False)
        return mock.MagicMock(
            __path__=[],
            __spec__=spec,
            FP8GlobalStateManager=fp8,
            autocast=lambda **_: contextlib.nullcontext(),
            fp8_autocast=lambda **_: contextlib.nullcontext(),
            TransformerEngineBaseModule=torch.nn.ModuleList,
        )

    def exec_module(self, module: Any) -> None:
        """There is nothing to run."""


def load() -> Any:
    """Import the module from the tree on the path.

    The `__init__` of its packages, and most modules that it imports, need the compiled extension.
    """
    from cppmega.proof import stand_ins

    root = next(path for path in map(Path, sys.path) if (path / FILE).is_file())
    stand_ins.forget("transformer_engine")
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        stand_ins.package(name, str(root / name.replace(".", "/")))
    name = "transformer_engine.pytorch.distributed"
    spec = spec_from_file_location(name, root / FILE)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    with mock.patch.object(sys, "meta_path", [_Absent(), *sys.meta_path]):
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def on_cpu(te: Any, device: Generator, capturing: bool = False) -> Iterator[None]:
    """Let it take the states of a stand-in for the device's generator.

    Args:
        te: the module.
        device: the generator.
        capturing: whether a CUDA graph is captured.
    """
    cuda = {
        "current_device": lambda: 0,
        "default_generators": (device,),
        "get_rng_state": device.get_state,
        "is_current_stream_capturing": lambda: capturing,
    }
    calls = {"_lazy_init": lambda: None, "_lazy_call": lambda call: call()}
    calls |= {"has_te_modules": lambda network: True, "graph_safe_rng_available": lambda: True}
    finders = [_Absent(), *sys.meta_path]  # some functions import when they are called
    with (
        mock.patch.multiple(torch.cuda, **cuda),
        mock.patch.multiple(te, create=True, **calls),
        mock.patch.object(sys, "meta_path", finders),
    ):
        yield
