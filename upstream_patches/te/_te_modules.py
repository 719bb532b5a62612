"""Modules of Transformer Engine without its compiled extension, for proofs on CPU."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from .. import _generators
from .._generators import Generator

PACKAGE = "transformer_engine.pytorch"


class _Absent(MetaPathFinder, Loader):
    """Provides stand-ins, with FP8 turned off, for all other modules of the package."""

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
        """Do nothing: a stand-in has no code."""


def load(module: str = "distributed") -> Any:
    """Import one of its modules, by default the one for recomputation, from the tree on the path.

    Its packages' `__init__`, and most modules that it imports, need the compiled extension.
    """
    from cppmega.proof import stand_ins

    name = f"{PACKAGE}.{module}"
    file = f"{name.replace('.', '/')}.py"
    root = next(path for path in map(Path, sys.path) if (path / file).is_file())
    stand_ins.forget("transformer_engine")
    for package in ("transformer_engine", PACKAGE):
        stand_ins.package(package, str(root / package.replace(".", "/")))
    spec = spec_from_file_location(name, root / file)
    assert spec is not None and spec.loader is not None
    loaded = module_from_spec(spec)
    sys.modules[name] = loaded
    with importing():
        spec.loader.exec_module(loaded)
    return loaded


def extension(**classes: type) -> Any:
    """Import Megatron's extension module with stand-ins for Transformer Engine.

    Args:
        classes: classes of `transformer_engine.pytorch` that Megatron's are derived from.
    """
    from cppmega.proof import stand_ins

    name = "megatron.core.extensions.transformer_engine"
    for forgotten in ("transformer_engine", name):
        stand_ins.forget(forgotten)
    with importing():
        import_module("transformer_engine").__version__ = "2.20.2"  # type: ignore[attr-defined]
        vars(import_module(PACKAGE)).update(classes)
        # Megatron keeps the version that it found first, which decides on the classes it defines.
        with mock.patch.object(import_module("megatron.core.utils"), "_te_version", None):
            return import_module(name)


def importing() -> Any:
    """A context in which stand-ins are imported, for functions that import when they are called."""
    return mock.patch.object(sys, "meta_path", [_Absent(), *sys.meta_path])


@contextlib.contextmanager
def on_cpu(te: Any, device: Generator, capturing: bool = False) -> Iterator[None]:
    """Make it use the states of a stand-in for the device's generator.

    Args:
        te: the module.
        device: the generator.
        capturing: whether a CUDA graph is captured.
    """
    calls = {"has_te_modules": lambda network: True, "graph_safe_rng_available": lambda: True}
    with (
        _generators.on_cpu(te, device, capturing),
        mock.patch.multiple(te, create=True, **calls),
        importing(),
    ):
        yield
