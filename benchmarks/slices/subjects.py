"""What `turns.py` measures: subjects, and the configurations in which each is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is compared."""

    title: str
    name: str
    """Of the files with the results."""
    pages: tuple[str, ...] = ()
    """Those that `before` lacks; empty: the sides differ only in their arguments."""
    curves: tuple[str, ...] = ()
    """The pages that `ours` has in addition to those of stock in the curves."""
    targets: Mapping[str, float] = field(default_factory=dict)
    """tokens/s of `after` over `before`, by part."""
    parts: tuple[str, ...]
    switches: Mapping[str, str] = field(default_factory=dict)
    """Variables of the environment in which patches are applied and runs are started."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Runs of one configuration."""

    batch: int
    arguments: tuple[str, ...] = ()
    """Megatron's own: as fields, they would make the recipe ask for the pages left out."""
    also: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Arguments of single sides."""
    fields: tuple[tuple[str, str], ...] = ()
    """Changes to the recipe, for settings that an argument would contradict."""
    turns: tuple[str, ...] = ("before", "after", "after", "before")
    steps: int | None = None
    """Steps of a curve; None: what the caller asks for."""
    linear: bool = True
    """The heads' losses without logits, which a micro-batch of 8 needs."""
    recipe: str = ""
    """The one that has these settings."""

    @property
    def is_curve(self) -> bool:
        return "stock" in self.turns


_KERNELS = ("fused8", "fused2", "dense8", "curves_dense", "curves_sparse")
_INDEXER = ("dsa_indexer_kernels", "dsa_indexer_prologue", "tilelang_indexer_parallel_store")
_ATTENTION = ("dsa_attention_kernels",)
SUBJECTS = {
    "indexer": Subject(
        title="The DSA indexer's kernels",
        name="dsa_indexer_slices_h200",
        pages=_INDEXER,
        curves=_INDEXER[:2],
        targets={"fused8": 1.25, "fused2": 1.4},
        parts=_KERNELS,
    ),
    "attention": Subject(
        title="The kernels of DSA's attention",
        name="dsa_attention_slices_h200",
        pages=_ATTENTION,
        curves=_ATTENTION,
        parts=_KERNELS,
    ),
    "graphs": Subject(
        title="CUDA graphs",
        name="dsa_graph_slices_h200",
        targets={"graphs2": 1.3, "graphs1": 1.3},
        parts=("graphs8", "graphs2", "graphs1", "curves_graphs"),
    ),
    "sharing": Subject(
        title="CUDA graphs of layers that share keys",
        name="dsa_sharing_graph_slices_h200",
        parts=("curves_shared", "shared1"),
        switches={"CPPMEGA_INDEX_CACHE": "1"},
    ),
}
_TILELANG = ("--dsa-kernel-backend", "tilelang")
_SPARSE = ("--dsa-indexer-use-sparse-loss",)
_FUSED = _TILELANG + _SPARSE
_GRAPHS = ("--cuda-graph-impl", "local", "--cuda-graph-modules", "attn", "moe_router")
_TE_GRAPHS = ("--cuda-graph-impl", "transformer_engine", *_GRAPHS[2:], "moe_preprocess")
_SHARED = (("pattern", "DDDE+DDDEDDDE/D-/D-"), ("dsa_index_pattern", "FSSFSSFSS"))
_CURVES = ("stock", "again", "ours")
_WITH_GRAPHS = {"after": _GRAPHS}


PARTS = {
    "fused8": Part(batch=8, arguments=_FUSED, recipe="nam56r_h200_slice_fused"),
    "fused2": Part(batch=2, arguments=_FUSED),
    "dense8": Part(batch=8, arguments=_TILELANG, recipe="nam56r_h200_slice_fused_dense"),
    "curves_dense": Part(batch=1, turns=_CURVES, linear=False),
    "curves_sparse": Part(batch=1, arguments=_SPARSE, turns=_CURVES, linear=False),
    **{f"graphs{n}": Part(batch=n, arguments=_FUSED, also=_WITH_GRAPHS) for n in (8, 2, 1)},
    "curves_graphs": Part(
        batch=1, arguments=_FUSED, also={"ours": _GRAPHS}, turns=_CURVES, steps=50
    ),
    "curves_shared": Part(
        batch=1,
        arguments=_FUSED,
        also={"ours": _GRAPHS, "te": _TE_GRAPHS},
        fields=_SHARED,
        turns=(*_CURVES, "te"),
        steps=50,
    ),
    "shared1": Part(batch=1, arguments=_FUSED, also=_WITH_GRAPHS, fields=_SHARED),
}
