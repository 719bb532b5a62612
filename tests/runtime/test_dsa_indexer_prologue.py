"""What an indexer computes is found by asking it, whatever its release."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from cppmega.calls import allowing  # noqa: E402
from cppmega.ops.pointwise.dsa_indexer_prologue import Rotary, prepare_index_inputs  # noqa: E402
from cppmega.ops.pointwise.dsa_indexer_prologue_naive import rotated  # noqa: E402
from cppmega.runtime.dsa_indexer_prologue import find_rotary  # noqa: E402
from tests.ops.pointwise.dsa_indexer_prologue_checks import angles, tensors  # noqa: E402


class Indexer:
    """Rotates as one release does."""

    index_head_dim, qk_pos_emb_head_dim = 16, 8
    config = SimpleNamespace(apply_rope_fusion=False)

    def __init__(self, ranks: tuple[int, int] = (1, 0), **layout: Any) -> None:
        cp = SimpleNamespace(size=lambda: ranks[0], rank=lambda: ranks[1])
        self.pg_collection = SimpleNamespace(cp=cp)
        self.layout = layout

    def _apply_rope(
        self, x: Tensor, angles: Tensor, mscale: float, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        documents = None if cu_seqlens is None else (cu_seqlens, cu_seqlens)
        rotary = Rotary(angles=angles, mscale=mscale, documents=documents, **self.layout)
        return rotated(x, rotary, cu_seqlens, False)


class Strict(Indexer):
    """Refuses documents that are longer than the angles, as 0.19 does."""

    def _apply_rope(
        self, x: Tensor, angles: Tensor, mscale: float, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        if cu_seqlens is not None and cu_seqlens.diff().max() > len(angles):
            raise RuntimeError("the sizes of the tensors do not match")
        return super()._apply_rope(x, angles, mscale, cu_seqlens)


@pytest.mark.parametrize(
    "first, gathered, adjacent", [*itertools.product((0, 8), (False, True), (False, True))]
)
def test_the_layout_is_found(first: int, gathered: bool, adjacent: bool) -> None:
    layout = {"first": first, "gathered": gathered, "adjacent": adjacent}
    # A method of its own: the answer is kept by the function.
    kind = type("Own", (Indexer,), {"_apply_rope": lambda *x, **y: Indexer._apply_rope(*x, **y)})
    indexer, (q, k, w), turn = kind(**layout), tensors(6, 2, 3, 16, torch.float32), angles(6, 8)
    rotary = find_rotary(indexer, q, k, w, turn, 1.25, rotate=None)
    assert rotary == Rotary(angles=turn, mscale=1.25, **layout)
    out = prepare_index_inputs(q, k, w, rotary, hadamard=False)
    torch.testing.assert_close(out[0], indexer._apply_rope(q, turn, 1.25))


@pytest.mark.parametrize(
    "bounds, fits", [((0, 6, 12), True), ((0, 4, 12), False), ((0, 4, 10), False)]
)
def test_lengths_are_refused_where_the_indexer_refuses_them(
    bounds: tuple[int, ...], fits: bool
) -> None:
    q, k, w = tensors(12, 1, 3, 16, torch.float32)
    documents = (torch.tensor(bounds, dtype=torch.int32),) * 2

    def found(indexer: Indexer) -> Rotary | None:
        return find_rotary(indexer, q, k, w, angles(6, 8), 1.0, rotate=None, documents=documents)

    assert found(Indexer()) is not None
    if fits:
        assert found(Strict()) is not None
    else:
        with pytest.raises(RuntimeError, match="does not describe the packed rows"):
            found(Strict())


def test_what_is_declined_says_why() -> None:
    q, k, w = tensors(6, 2, 3, 16, torch.float32)

    def declined(reason: str, *given: Any, **how: Any) -> None:
        with (
            allowing("dsa_indexer_prologue"),
            pytest.warns(UserWarning, match=f"^dsa_indexer_prologue: .*{reason}"),
        ):
            assert find_rotary(*given, **{"rotate": None, **how}) is None

    turn = angles(6, 8)
    declined("on meta", Indexer(), *(x.to("meta") for x in (q, k, w)), turn, 1.0)
    declined("7 positions and 6 rows", Indexer(), q, k, w, angles(7, 8), 1.0)
    declined("not the Hadamard", Indexer(), q, k, w, turn, 1.0, rotate=lambda x: x)
    bounds = torch.tensor([0, 6])
    declined("several rows", Indexer(), q, k, w, turn, 1.0, documents=(bounds, bounds))
    fused = Indexer()
    fused.config = SimpleNamespace(apply_rope_fusion=True)
    declined("fusion is on", fused, q, k, w, turn, 1.0)
