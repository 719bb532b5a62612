"""Determine which prologue Megatron's DSA indexer computes, in the terms of `cppmega.ops`.

The page `dsa_indexer_prologue` calls `find_rotary` between the indexer's projections and its
scores. Which columns `_apply_rope` rotates, and how, differs between releases and between trees
with and without the page `dsa_indexer_rope`; `rotate_activation` may be the package's or that of
`dsa_hadamard_transform`. Both functions are therefore probed, once each, with unit vectors, which
also records that the run has passed through those pages. If one of them computes something else (a
subclass, a mock), or the kernel does not support it, the call is declined.
On a CPU the reference replaces the kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cppmega.calls import served
from cppmega.ops.pointwise import dsa_indexer_prologue_naive as reference
from cppmega.ops.pointwise.dsa_indexer_prologue import Rotary, obstacle
from cppmega.ops.pointwise.hadamard import walsh_hadamard


class _DeclinedError(Exception):
    """Why Megatron's own code must run, as a clause."""


class _Layout(NamedTuple):
    """What is rotated in a head; the fields of `Rotary`."""

    first: int
    gathered: bool
    adjacent: bool


_LAYOUTS: dict[tuple[Any, ...], _Layout | None] = {}
_REFUSES: dict[tuple[Any, ...], bool] = {}
_HADAMARD: dict[tuple[Any, ...], bool] = {}


def find_rotary(
    indexer: Any,
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    angles: Tensor,
    mscale: float,
    *,
    rotate: Callable[[Tensor], Tensor] | None,
    documents: tuple[Tensor, Tensor] | None = None,
) -> Rotary | None:
    """Return the rotary embedding for `prepare_index_inputs`, or None to run Megatron's own code.

    Args:
        indexer: a `DSAIndexer`.
        q: `[s, b, heads, d]`, output of its projection.
        k: `[s, b, d]`, output of its norm.
        weights: `[s, b, heads]`, output of its projection.
        angles: the result of its `rotary_pos_emb`.
        mscale: YaRN's factor.
        rotate: `rotate_activation` of its module; None if the activations are not rotated.
        documents: `cu_seqlens` of q and of k in a packed batch.
    """
    try:
        rotary = _rotary(indexer, q, angles, mscale, documents)
        if rotate is not None:
            _check_transform(rotate, q, k)
        why = None if q.device.type == "cpu" else obstacle(q, k, weights, rotary)
        if why is not None:
            raise _DeclinedError(why)
    except _DeclinedError as why_not:
        served("dsa_indexer_prologue", str(why_not), q=q, k=k, angles=angles)
        return None
    served("dsa_indexer_prologue")
    if documents is not None and _refuses_other_lengths(indexer, rotary):
        for bounds in {id(bounds): bounds for bounds in documents}.values():
            _assert_covered(bounds, len(q), rotary)
    return rotary


def _rotary(
    indexer: Any,
    q: Tensor,
    angles: Tensor,
    mscale: float,
    documents: tuple[Tensor, Tensor] | None,
) -> Rotary:
    layout = _layout(indexer, angles.size(-1), mscale)
    rows, cp = len(angles), indexer.pg_collection.cp
    if angles.numel() != rows * angles.size(-1):
        raise _DeclinedError(f"the angles are of shape {tuple(angles.shape)}")
    if documents is None and rows != len(q):
        raise _DeclinedError(f"there are angles for {rows} positions and {len(q)} rows")
    if documents is not None and (q.size(1) != 1 or cp is None):
        raise _DeclinedError("a packed batch has several rows, or no context-parallel group")
    return Rotary(
        angles=angles,
        mscale=mscale,
        documents=documents and (documents[0].to(q.device), documents[1].to(q.device)),
        ranks=(cp.size(), cp.rank()) if documents else (1, 0),
        **layout._asdict(),
    )


def _layout(indexer: Any, width: int, mscale: float) -> _Layout:
    """How the indexer's `_apply_rope` rotates a head."""
    config = indexer.config
    function = getattr(indexer._apply_rope, "__func__", None)
    if function is None or getattr(config, "apply_rope_fusion", False):
        raise _DeclinedError("_apply_rope is not a method of a class, or its fusion is on")
    options = ("rotary_interleaved", "dsa_indexer_rope_interleaved", "multi_latent_attention")
    key = (
        *(function, indexer.index_head_dim, indexer.qk_pos_emb_head_dim, width, mscale),
        *(getattr(config, name, None) for name in options),
    )
    if key not in _LAYOUTS:
        _LAYOUTS[key] = _probe_layout(indexer, width, mscale)
    layout = _LAYOUTS[key]
    if layout is None:
        raise _DeclinedError("_apply_rope computes no rotary embedding that the kernel supports")
    return layout


@torch.no_grad()
def _probe_layout(indexer: Any, width: int, mscale: float) -> _Layout | None:
    d = indexer.index_head_dim
    unit = torch.eye(d, device="cpu").view(1, 1, d, d)
    # All distinct: the two columns of a pair need different angles, too.
    angles = torch.linspace(0.1, 1.5, width, device="cpu").view(1, 1, 1, width)
    turned = indexer._apply_rope(unit, angles, mscale)
    firsts, either = (0, d - indexer.qk_pos_emb_head_dim), (False, True)
    for layout in itertools.starmap(_Layout, itertools.product(firsts, either, either)):
        rotary = Rotary(angles=angles, mscale=mscale, **layout._asdict())
        if torch.allclose(turned, reference.rotated(unit, rotary, None, False), atol=1e-5):
            return layout
    return None


def _refuses_other_lengths(indexer: Any, rotary: Rotary) -> bool:
    """Whether `_apply_rope` fails if a document is longer than the angles, as in 0.19.

    Later releases use the last angle, because rows after the last document are padding.
    """
    key = (indexer._apply_rope.__func__, rotary.ranks)
    if key not in _REFUSES:
        rows, d, width = 4, indexer.index_head_dim, rotary.angles.size(-1)
        bounds = torch.tensor([0, rows * rotary.ranks[0]], dtype=torch.int32, device="cpu")
        x, angles = (torch.zeros(n, 1, 1, m, device="cpu") for n, m in ((rows, d), (2, width)))
        try:
            indexer._apply_rope(x, angles, 1.0, cu_seqlens=bounds)
        except (RuntimeError, IndexError):
            _REFUSES[key] = True
        else:
            _REFUSES[key] = False
    return _REFUSES[key]


def _check_transform(rotate: Callable[[Tensor], Tensor], q: Tensor, k: Tensor) -> None:
    """Decline if `rotate` is not the Hadamard transform of the kernel."""
    d = q.size(-1)
    if d & (d - 1) or k.dtype != q.dtype:
        raise _DeclinedError(f"heads are {d} wide, q is {q.dtype} and k {k.dtype}")
    # Both the function and the package that it calls can be replaced.
    package = getattr(rotate, "__globals__", {}).get("hadamard_transform")
    key = (rotate, package, d, q.dtype, q.device)
    if key not in _HADAMARD:
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            raise _DeclinedError("a CUDA graph is captured before the first forward")
        _HADAMARD[key] = _is_hadamard(rotate, torch.eye(d, dtype=q.dtype, device=q.device))
    if not _HADAMARD[key]:
        raise _DeclinedError("rotate_activation is not the Hadamard transform")


@torch.no_grad()
def _is_hadamard(rotate: Callable[[Tensor], Tensor], unit: Tensor) -> bool:
    return torch.allclose(rotate(unit), walsh_hadamard(unit, len(unit) ** -0.5), rtol=1e-2)


def _assert_covered(bounds: Tensor, rows: int, rotary: Rotary) -> None:
    """Fail where Megatron 0.19 does, without making the host wait.

    It splits the rows by `cu_seqlens` and takes one angle per row of a document.
    """
    ranks, positions = rotary.ranks[0], len(rotary.angles)
    covered = bounds[-1] == rows * ranks
    if ranks > 1:  # each rank has two pieces of equal length of each document
        covered = covered & (bounds % (2 * ranks) == 0).all()
    if positions < rows * ranks:
        covered = covered & (bounds.diff().max() <= positions)
    torch._assert_async(covered, "cu_seqlens does not describe the packed rows and their angles")
