"""A stand-in for Transformer Engine that notes under which FP8 context layers are built and run.

Installed before megatron is imported, so that its own wrappers, specs and contexts are those of a
machine with Transformer Engine. The layers compute what plain torch ones would: FP8 is noted only.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F  # noqa: N812

RAN: list[tuple[torch.nn.Module, bool, Any]] = []
"""(layer, FP8 was on, recipe) of every forward."""
WEIGHTS: dict[torch.nn.Module, bool] = {}
"""Layer -> whether its weights were made in FP8."""
ON = {"gemms": False, "weights": False, "recipe": None}


@contextlib.contextmanager
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Any = None,
    fp8_group: Any = None,
) -> Iterator[None]:
    """As Transformer Engine's: the innermost one counts."""
    before = dict(ON)
    ON.update(gemms=enabled, recipe=fp8_recipe)
    try:
        yield
    finally:
        ON.update(before)


@contextlib.contextmanager
def fp8_model_init(
    enabled: bool = True, recipe: Any = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """As Transformer Engine's."""
    before = ON["weights"]
    ON["weights"] = enabled
    try:
        yield
    finally:
        ON["weights"] = before


def checkpoint(function: Any, *arguments: Any, **kwargs: Any) -> Any:
    """Runs the function again in the backward, in the FP8 state of the forward."""
    tensors = [a for a in arguments if isinstance(a, torch.Tensor) or a is None]
    fp8, recipe = ON["gemms"], ON["recipe"]

    def again(*given: Any) -> Any:
        with fp8_autocast(enabled=bool(fp8), fp8_recipe=recipe):
            return function(*given)

    return torch.utils.checkpoint.checkpoint(
        again, *tensors, use_reentrant=False, preserve_rng_state=False
    )


class Layer(torch.nn.Module):
    """A layer of Transformer Engine with weights."""

    def __init__(self, *arguments: Any, return_bias: bool = False, **kwargs: Any) -> None:
        super().__init__()
        WEIGHTS[self] = bool(ON["weights"])
        self.return_bias = return_bias
        sizes = ("num_gemms", "in_features", "out_features")
        self.make(*arguments, **{name: kwargs[name] for name in sizes if name in kwargs})

    def make(self, *arguments: Any) -> None:
        """The parameters."""

    save_original_input = False

    def set_tensor_parallel_group(self, group: Any) -> None:
        """One rank."""

    def note(self) -> None:
        """Before every computation."""
        RAN.append((self, bool(ON["gemms"]), ON["recipe"]))

    def out(self, x: torch.Tensor) -> Any:
        """As the caller asked for it."""
        return (x, None) if self.return_bias else x


class Linear(Layer):
    def make(self, in_features: int, out_features: int) -> None:
        self.weight = torch.nn.Parameter(torch.randn(out_features, in_features) / in_features**0.5)

    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        self.note()
        return self.out(F.linear(x, self.weight))


class LayerNormLinear(Linear):
    def make(self, in_features: int, out_features: int) -> None:
        super().make(in_features, out_features)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(in_features))

    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        self.note()
        x = F.rms_norm(x, x.shape[-1:], self.layer_norm_weight)
        return self.out(F.linear(x, self.weight))


class GroupedLinear(Layer):
    def make(self, num_gemms: int, in_features: int, out_features: int) -> None:
        self.num_gemms = num_gemms
        for n in range(num_gemms):
            weight = torch.randn(out_features, in_features) / in_features**0.5
            self.register_parameter(f"weight{n}", torch.nn.Parameter(weight))

    def forward(self, x: torch.Tensor, m_splits: Any, **kwargs: Any) -> Any:
        self.note()
        parts = x.split(list(m_splits))
        out = [F.linear(part, getattr(self, f"weight{n}")) for n, part in enumerate(parts)]
        return self.out(torch.cat(out))


class DotProductAttention(Layer):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *r: Any, **kw: Any) -> Any:
        self.note()
        q, k, v = (part.permute(1, 2, 0, 3) for part in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)


class Norm(torch.nn.Module):
    def __init__(self, hidden_size: int = 0, *, normalized_shape: int = 0, **kwargs: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size or normalized_shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight)


class Padding(torch.nn.Module):
    """No kernel asks for aligned rows here."""

    def __init__(self, *arguments: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor, splits: Any) -> Any:
        return x, splits


class Unpadding(Padding):
    def forward(self, x: torch.Tensor, splits: Any) -> Any:
        return x


class SplitAlongDim:
    """Used as an autograd function is."""

    @staticmethod
    def apply(x: torch.Tensor, dim: int, sizes: Any) -> Any:
        return x.split(sizes, dim)


class FP8GlobalStateManager:
    """What Megatron asks of it."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return bool(ON["gemms"])

    @staticmethod
    def get_fp8_recipe() -> Any:
        return ON["recipe"]


_OURS = {
    "Linear": Linear,
    "LayerNormLinear": LayerNormLinear,
    "GroupedLinear": GroupedLinear,
    "DotProductAttention": DotProductAttention,
    "LayerNorm": Norm,
    "RMSNorm": Norm,
    "Format": mock.MagicMock(name="Format"),
    "Fp8Padding": Padding,
    "Fp8Unpadding": Unpadding,
    "FP8GlobalStateManager": FP8GlobalStateManager,
    "_SplitAlongDim": SplitAlongDim,
    "fp8_autocast": fp8_autocast,
    "fp8_model_init": fp8_model_init,
    "checkpoint": checkpoint,
    "get_cpu_offload_context": lambda *a, **k: (contextlib.nullcontext(), lambda x: x),
}


_MISSING = {"general_gemm"}
"""Names without which Megatron takes torch's own."""


class _Module(types.ModuleType):
    """Has every name: ours, an empty class, or a function that nobody may call unseen."""

    __version__ = "2.8.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in _MISSING:
            raise AttributeError(name)
        if name in _OURS:
            made = _OURS[name]
        elif name[0].isupper():
            made = type(name, (), {"__init__": lambda self, *a, **k: None})
        else:
            made = mock.MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        *_, last = name.split(".")
        if name.partition(".")[0] == "transformer_engine" and last not in _MISSING:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


def install() -> None:
    """Let `import transformer_engine` find the stand-in."""
    sys.meta_path.insert(0, _Finder())
    importlib.import_module("transformer_engine.common.recipe")
