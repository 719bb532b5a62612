"""Megatron's DSA indexer in plain torch and in TileLang, as `dsa_indexer.py` calls them."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from cppmega.ops.pointwise.dsa_indexer_prologue import Rotary
from cppmega.ops.pointwise.hadamard import walsh_hadamard

PACKAGE = "megatron.core.transformer.experimental_attention_variant"

Tensors = tuple[torch.Tensor, ...]
Call = Callable[[], Any]


class _Alone:
    """A process group of one."""

    @staticmethod
    def size() -> int:
        return 1

    @staticmethod
    def rank() -> int:
        return 0


class _Groups:
    tp = cp = _Alone()


class Megatron:
    """Megatron's own functions on our tensors."""

    def __init__(self, patched: Path | None) -> None:
        self.dsa = importlib.import_module(f"{PACKAGE}.dsa")
        self.tilelang = importlib.import_module(f"{PACKAGE}.ops.tilelang_dsa")
        self.forward = importlib.import_module(f"{PACKAGE}.ops.tilelang_indexer_fwd")
        self.patched_forward = patched and _loaded_beside(self.forward, patched)

    @staticmethod
    def bounds(sequence: int) -> dict[str, torch.Tensor]:
        """Causal, row by row."""
        rows = torch.arange(sequence, device="cuda", dtype=torch.int32)
        return {"starts": torch.zeros_like(rows), "ends": rows + 1}

    def loss(self, sparse: bool, topk: int, scale: float) -> Callable[..., torch.Tensor]:
        """The path that DSA takes without kernels."""

        def call(*tensors: torch.Tensor) -> torch.Tensor:
            q, k, w, query, key = tensors
            size = q.size(0)
            mask = torch.full((size, size), -torch.inf, device="cuda").triu_(1)
            key = key.expand(-1, -1, query.size(2), -1)
            found: torch.Tensor = self.dsa.FusedDSAIndexerLoss.apply(
                q, w, k, query, key, scale, topk, 1.0, mask, sparse, _Groups, None, None, None,
                None, False, True,
            )[1]  # fmt: skip
            return found

        return call

    def streamed(self, topk: int, scale: float) -> Callable[..., torch.Tensor]:
        """TileLang's path with the sparse loss."""

        def call(*tensors: torch.Tensor) -> torch.Tensor:
            q, k, w, query, key = tensors
            found = self.tilelang.fused_qk_topk_lighting_with_streaming_sparse_kl(
                q, k, w, topk, *self.bounds(q.size(0)).values(), 8192, query, key, scale, 1.0,
                _Groups,
            )  # fmt: skip
            assert found is not None, "declined"
            loss: torch.Tensor = found[1]
            return loss

        return call

    def prologue(self, rotary: Rotary) -> Callable[..., Tensors]:
        """Unfused rotary embedding, and the Hadamard transform that our page puts in."""
        self.dsa.hadamard_transform = walsh_hadamard
        layer = SimpleNamespace(qk_pos_emb_head_dim=rotary.angles.size(-1), pg_collection=_Groups)
        layer.config = SimpleNamespace(apply_rope_fusion=False, rotary_interleaved=False)
        layer.config.dsa_indexer_rope_interleaved = rotary.gathered
        documents = None if rotary.documents is None else rotary.documents[0]

        def call(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> Tensors:
            layer.index_head_dim = q.size(-1)
            turn = lambda x: self.dsa.rotate_activation(  # noqa: E731
                self.dsa.DSAIndexer._apply_rope(layer, x, rotary.angles, 1.0, documents)
            )
            scaled = w * q.size(2) ** -0.5 * q.size(3) ** -0.5
            return turn(q), turn(k.unsqueeze(2)).squeeze(2), scaled

        return call

    def choice(self, tensors: Tensors, topk: int) -> Call:
        """TileLang's scores and torch's top-k, in Megatron's loop."""
        bounds = self.bounds(tensors[0].size(0))
        return lambda: self.tilelang.fused_qk_topk_lighting(
            *tensors[:3], topk, *bounds.values(), 8192
        )

    def scores(self, forward: ModuleType, tensors: Tensors) -> Call:
        """TileLang's scores alone."""
        q, k, w = tensors[:3]
        bounds = self.bounds(q.size(0))

        def each() -> None:
            for b in range(q.size(1)):
                parts = (x[:, b].contiguous() for x in (q, k, w))
                forward.indexer_fwd_interface(*parts, *bounds.values())

        return each


def _loaded_beside(module: ModuleType, root: Path) -> ModuleType:
    """The same module from another tree, which takes its neighbors from this one."""
    name = f"{module.__name__}_patched"
    file = root.joinpath(*module.__name__.split(".")).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made
