"""Transformer Engine's recomputation without its compiled extension, for proofs on a CPU."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

FILE = "transformer_engine/pytorch/distributed.py"
_KINDS = ("float8", "mxfp8", "nvfp4", "float8_blockwise")


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

    def clone_state(self) -> Generator:
        return Generator(*self.state)

    def mask(self) -> torch.Tensor:
        """Draw: the offset advances in place."""
        self.state[1] += 1
        seed, offset = self.state
        return torch.tensor([1.0, 100.0 * seed, offset])


def load() -> Any:
    """Import the module from the tree on the path, in FP8's absence.

    The `__init__` of its packages, and most modules that it imports, need the compiled extension.
    """
    from cppmega.proof import stand_ins

    root = next(path for path in map(Path, sys.path) if (path / FILE).is_file())
    stand_ins.forget("transformer_engine")
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        stand_ins.package(name, str(root / name.replace(".", "/")))
    here = "transformer_engine.pytorch"
    others = ("triton.pad", "utils", "constants", "quantized_tensor")
    for name in (*others, *(f"tensor.{kind}_tensor" for kind in _KINDS)):
        stand_ins.module(f"{here}.{name}")
    for kind in _KINDS:
        stand_ins.module(f"{here}.tensor.storage.{kind}_tensor_storage")
    stand_ins.module("transformer_engine_torch")
    stand_ins.module("transformer_engine.debug.pytorch.debug_quantization")
    stand_ins.module(f"{here}.module.base", TransformerEngineBaseModule=torch.nn.ModuleList)
    state = SimpleNamespace(is_first_fp8_module=False)
    stand_ins.module(
        f"{here}.quantization",
        FP8GlobalStateManager=SimpleNamespace(
            is_fp8_enabled=lambda: False, quantization_state=state
        ),
        autocast=lambda **_: contextlib.nullcontext(),
    )
    from transformer_engine.pytorch import distributed

    return distributed


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
        "is_current_stream_capturing": lambda: capturing,
    }
    calls = {"_lazy_init": lambda: None, "_lazy_call": lambda call: call()}
    calls |= {"get_te_classes": lambda: (), "graph_safe_rng_available": lambda: True}
    with mock.patch.multiple(torch.cuda, **cuda), mock.patch.multiple(te, **calls):
        yield
