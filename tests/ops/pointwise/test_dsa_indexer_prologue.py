"""The indexer's prologue: plain torch against Megatron, the kernel against plain torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from cppmega.ops.pointwise.dsa_indexer_prologue import (  # noqa: E402
    Rotary,
    obstacle,
    prepare_index_inputs,
)
from cppmega.ops.pointwise.hadamard import walsh_hadamard  # noqa: E402
from cppmega.proof.host_sync import no_host_sync  # noqa: E402
from tests.ops.dsa_indexer.test_dsa_indexer import Operators, Recorder  # noqa: E402
from tests.ops.in_interpreter import run  # noqa: E402
from tests.ops.pointwise.dsa_indexer_prologue_checks import angles, check_prologue, tensors  # noqa: E402

pytestmark = pytest.mark.slow

DOCUMENTS = torch.tensor([0, 4, 4, 12, 24], dtype=torch.int32)
FILLED = torch.tensor([0, 4, 12, 24], dtype=torch.int32)  # Megatron cannot pair columns of no row


def complex_rotation(x: Tensor, position: int, width: int) -> Tensor:
    """The definition: column pairs (i, i + width / 2) as complex numbers, turned."""
    angle = angles(position + 1, width)[position, 0, 0, : width // 2].double()
    turned = torch.complex(*x[..., :width].chunk(2, -1)) * torch.polar(
        torch.ones_like(angle), angle
    )
    return torch.cat((turned.real, turned.imag, x[..., width:]), -1)


def test_rows_are_turned_transformed_and_scaled() -> None:
    q, k, w = tensors(7, 2, 3, 16, torch.float64)
    out = prepare_index_inputs(q, k, w, Rotary(angles=angles(7, 8)))
    want = walsh_hadamard(complex_rotation(q[5], 5, 8), 0.25)
    torch.testing.assert_close(out[0][5], want)
    torch.testing.assert_close(out[1][6], walsh_hadamard(complex_rotation(k[6], 6, 8), 0.25))
    torch.testing.assert_close(out[2], w * 48**-0.5)


def test_without_the_transform_and_with_the_part_at_the_back() -> None:
    q, k, w = tensors(4, 1, 2, 24, torch.float64)
    rotary = Rotary(angles=angles(4, 8), first=16, mscale=1.25)
    out = prepare_index_inputs(q, k, w, rotary, hadamard=False, scale=2.0)
    assert torch.equal(out[0][..., :16], q[..., :16])
    torch.testing.assert_close(out[1][3, ..., 16:], 1.25 * complex_rotation(k[3, ..., 16:], 3, 8))
    torch.testing.assert_close(out[2], w * 2)


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("adjacent", [False, True])
def test_the_gradient_is_that_of_numbers(gathered: bool, adjacent: bool) -> None:
    made = [x.requires_grad_() for x in tensors(3, 1, 2, 8, torch.float64)]
    turn = angles(3, 4, adjacent=adjacent).double()
    rotary = Rotary(angles=turn, mscale=1.5, gathered=gathered, adjacent=adjacent)
    assert torch.autograd.gradcheck(lambda *x: prepare_index_inputs(*x, rotary), made)


@pytest.mark.megatron
@pytest.mark.parametrize("gathered, adjacent", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(
    "documents, ranks, positions",
    [(None, (1, 0), 24), (FILLED, (1, 0), 12), (FILLED, (1, 0), 24)]
    + [(FILLED * 2, (2, rank), count) for rank in (0, 1) for count in (24, 48)],
)
def test_rows_are_rotated_as_megatron_does(
    gathered: bool, adjacent: bool, documents: Any, ranks: tuple[int, int], positions: int
) -> None:
    dsa = pytest.importorskip("megatron.core.transformer.experimental_attention_variant.dsa")
    group = SimpleNamespace(size=lambda: ranks[0], rank=lambda: ranks[1])
    layer = SimpleNamespace(
        qk_pos_emb_head_dim=8,
        index_head_dim=32,
        pg_collection=SimpleNamespace(cp=group),
        config=SimpleNamespace(
            apply_rope_fusion=False,
            rotary_interleaved=adjacent,
            dsa_indexer_rope_interleaved=gathered,
        ),
    )
    turn = angles(positions, 8, adjacent=adjacent)
    q, k, w = tensors(24, 1 if documents is not None else 2, 2, 32, torch.float32)
    rotary = Rotary(
        angles=turn,
        mscale=1.25,
        gathered=gathered,
        adjacent=adjacent,
        documents=None if documents is None else (documents, documents),
        ranks=ranks,
    )
    found = prepare_index_inputs(q, k, w, rotary, hadamard=False)
    for mine, x in ((found[0], q), (found[1].unsqueeze(2), k.unsqueeze(2))):
        want = dsa.DSAIndexer._apply_rope(layer, x, turn, 1.25, cu_seqlens=documents)
        torch.testing.assert_close(mine, want)


def test_the_host_waits_for_nothing() -> None:
    made = [x.requires_grad_() for x in tensors(24, 1, 2, 8, torch.float32)]
    rotary = Rotary(angles=angles(24, 8), documents=(DOCUMENTS, DOCUMENTS))
    with no_host_sync():
        sum(x.sum() for x in prepare_index_inputs(*made, rotary)).backward()  # type: ignore[union-attr]


def test_shapes_that_do_not_fit_are_refused() -> None:
    q, k, w = tensors(4, 1, 2, 24, torch.float32)
    with pytest.raises(ValueError, match="power of two, got 24"):
        prepare_index_inputs(q, k, w, Rotary(angles=angles(4, 8)))
    with pytest.raises(ValueError, match="for 24 columns"):
        prepare_index_inputs(q, k, w, Rotary(angles=angles(4, 8), first=17), hadamard=False)
    with pytest.raises(ValueError, match="3 positions and 4 rows"):
        prepare_index_inputs(q, k, w, Rotary(angles=angles(3, 8)), hadamard=False)
    with pytest.raises(ValueError, match="of another q"):
        prepare_index_inputs(q, k[1:], w, Rotary(angles=angles(4, 8)), hadamard=False)


def test_obstacles_are_named() -> None:
    made = [x.to("meta") for x in tensors(4, 1, 2, 16, torch.bfloat16)]
    assert obstacle(*made, Rotary(angles=angles(4, 8))) == "the tensors are on meta"


def test_the_kernel_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    code = """
import torch
from tests.ops.pointwise.test_dsa_indexer_prologue import DOCUMENTS
from tests.ops.pointwise.dsa_indexer_prologue_checks import *

half, full = torch.float16, torch.float32
check_prologue(5, 3, 3, 32, Rotary(angles=angles(5, 32)), full)
check_prologue(9, 2, 5, 64, Rotary(angles=angles(9, 16), mscale=1.25, gathered=True), half)
back = Rotary(angles=angles(3, 64, adjacent=True), adjacent=True, first=64)
check_prologue(3, 1, 2, 128, back, full)
check_prologue(4, 1, 3, 48, Rotary(angles=angles(4, 16), first=32), full, hadamard=False)
for ranks, length in (((1, 0), 24), ((1, 0), 12), ((2, 1), 24), ((2, 0), 48)):
    at = DOCUMENTS * ranks[0]
    packed = Rotary(angles=angles(length, 8), documents=(at, at.long()), ranks=ranks)
    check_prologue(24, 1, 2, 32, packed, full)
one = torch.tensor([0, 6])
check_prologue(6, 1, 1, 32, Rotary(angles=angles(6, 8), documents=(one, one)), full)
empty = tensors(0, 1, 2, 32, full)
assert Prepare.apply(*empty, Rotary(angles=angles(1, 8)), True, 1.0)[0].shape == (0, 1, 2, 32)
"""
    run(code)


@pytest.mark.parametrize("s, b", [(3, 1), (70, 4)])
def test_three_launches_each_way(s: int, b: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from cppmega.ops.pointwise import dsa_indexer_prologue as prologue
    from cppmega.ops.pointwise import dsa_indexer_prologue_triton as kernels

    monkeypatch.setattr(kernels, "_prologue_kernel", Recorder())
    monkeypatch.setattr(prologue, "obstacle", lambda *call: None)
    made = [x.requires_grad_() for x in tensors(s, b, 2, 32, torch.bfloat16)]
    rotary = Rotary(angles=angles(s, 8))
    upstream = tensors(s, b, 2, 32, torch.bfloat16)
    Recorder.launches = 0
    with Operators() as operators:
        out = prepare_index_inputs(*made, rotary)
        assert Recorder.launches == 1 and operators.names == ["cos", "sin"]
        torch.autograd.grad(out, made, upstream)
    assert Recorder.launches == 2 and operators.names == ["cos", "sin"] * 2


@pytest.mark.gpu
@pytest.mark.parametrize(
    "heads, d, width, gathered, dtype",
    [
        (8, 32, 32, False, torch.bfloat16),
        (32, 64, 64, True, torch.bfloat16),
        (64, 128, 64, False, torch.bfloat16),
        (24, 64, 16, True, torch.float32),
    ],
)
def test_errors_on_cuda(heads: int, d: int, width: int, gathered: bool, dtype: torch.dtype) -> None:
    how: dict[str, Any] = {"angles": angles(333, width).cuda(), "gathered": gathered}
    check_prologue(333, 3, heads, d, Rotary(**how, mscale=1.1), dtype, device="cuda")
    documents = torch.tensor([0, 100, 100, 107, 333], device="cuda")
    how |= {"documents": (documents, documents.int()), "first": d - width}
    check_prologue(333, 1, heads, d, Rotary(**how), dtype, device="cuda", hadamard=False)
    how["angles"] = angles(300, width).cuda()
    check_prologue(333, 1, heads, d, Rotary(**how), dtype, device="cuda")
