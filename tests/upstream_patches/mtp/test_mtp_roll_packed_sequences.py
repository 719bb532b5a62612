"""Compare MTP's roll with plain loops over documents, on 1, 2 and 4 ranks.

The checks run in one process per version, which imports the patched tree, loads the unpatched file
as well, and forks the ranks: importing megatron-core takes longer than all of them.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import patched, pristine, python

torch = pytest.importorskip("torch")

from tests.upstream_patches.mtp.mtp_roll_ranks import in_ranks, on_every_rank  # noqa: E402
from tests.upstream_patches.packed_sequences import (  # noqa: E402
    DTYPES,
    LEADS,
    Pack,
    full,
    packs,
    same,
    values,
)

PAGE = "mtp_roll_packed_sequences"
FILE = "megatron/core/transformer/multi_token_prediction.py"


@pytest.mark.megatron
@pytest.mark.parametrize("version", ["0.15.3", "0.16.1", "0.19.2"])
def test_roll(version: str) -> None:
    code = f"""
    from tests.upstream_patches.mtp import test_{PAGE} as here
    here.check({str(pristine(version) / FILE)!r}, {version!r})
    """
    done = python(patched(version, PAGE), code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "done", done.stdout


@pytest.mark.parametrize("version", ["0.17.1", "0.18.2"])
def test_the_versions_between_have_these_texts(version: str) -> None:
    """`roll_tensor` is that of 0.16.1 there, and the rest that of 0.19.2; both are tested above."""
    between, before, after = (texts(patched(v, PAGE)) for v in (version, "0.16.1", "0.19.2"))
    for name, other in {
        "roll_tensor": before,
        "_roll_tensor_packed_seq": after,
        "_cppmega_roll_documents": after,
    }.items():
        assert between[name] == other[name]


def texts(root: Path) -> dict[str, str]:
    """Return name -> code of the top-level functions of the patched file."""
    tree = ast.parse((root / FILE).read_text())
    return {node.name: ast.dump(node) for node in tree.body if isinstance(node, ast.FunctionDef)}


def check(stock_file: str, version: str) -> None:
    from megatron.core.transformer import multi_token_prediction as mtp

    spec = importlib.util.spec_from_file_location("stock_mtp", stock_file)
    stock = sys.modules["stock_mtp"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stock)
    backport = version == "0.15.3"  # stock cannot roll packs there

    for world in (2, 4):  # forked before torch has threads
        in_ranks(world, on_every_rank, mtp.roll_tensor, stock.roll_tensor, backport)
    one_rank(mtp.roll_tensor)
    asserts_are_kept(mtp.roll_tensor)
    gradient_follows(mtp.roll_tensor)
    unpacked_is_as_before(mtp.roll_tensor, stock.roll_tensor)
    if not backport:
        unpadded_packs_are_as_before(mtp.roll_tensor, stock.roll_tensor)
        stock_is_wrong(stock.roll_tensor)
    if version == "0.19.2":  # from 0.18 on the padding mask is rolled too
        padding_stays_padding(mtp, stock)
    print("done")


def one_rank(roll: Callable[..., Any]) -> None:
    from cppmega.proof.host_sync import no_host_sync

    for pack in packs():
        for lead, dtype in zip(LEADS, DTYPES, strict=True):
            tensor = values((*lead, pack.size), dtype)
            before = tensor.clone()
            with no_host_sync():
                rolled, total = roll(tensor, packed_seq_params=pack.params)
            expected = pack.rolled(tensor)
            same(rolled, expected)
            same(total, expected.sum())
            same(tensor, before)
            same(roll(tensor, -1, tensor.dim() - 1, None, pack.params)[0], expected)
    # Garbage in padding stays there.
    pack = Pack([(2, 4)], tail=1)
    rolled, total = roll(
        torch.tensor([1.0, 2.0, *[float("nan")] * 3]), packed_seq_params=pack.params
    )
    assert rolled.tolist() == [2, 0, 0, 0, 0] and total.item() == 2


def asserts_are_kept(roll: Callable[..., Any]) -> None:
    tensor, pack = torch.ones(2, 3), Pack([(3, 3)]).params
    without = SimpleNamespace(cu_seqlens_q=None, cu_seqlens_q_padded=None)
    other = SimpleNamespace(
        cu_seqlens_q=torch.tensor([0, 3]), cu_seqlens_q_padded=torch.tensor([0, 2, 3])
    )
    for bad in (
        {"dims": 0, "packed_seq_params": pack},
        {"shifts": -2, "packed_seq_params": pack},
        {"packed_seq_params": without},
        {"packed_seq_params": other},
        {"shifts": -2, "cp_group": SimpleNamespace(size=lambda: 2)},
    ):
        with pytest.raises(AssertionError):
            roll(tensor, **bad)


def gradient_follows(roll: Callable[..., Any]) -> None:
    """The hidden states that main mixes are rolled with their gradient."""
    pack = Pack([(3, 4), (2, 4)])
    tensor = values((2, 8), torch.float32).requires_grad_()
    weight = values((2, 8), torch.float32, seed=1)
    (roll(tensor, packed_seq_params=pack.params)[0] * weight).sum().backward()
    expected = torch.zeros(2, 8)
    for at in (0, 1, 4):
        expected[:, at + 1] = weight[:, at]
    same(tensor.grad, expected)


def unpacked_is_as_before(roll: Callable[..., Any], stock: Callable[..., Any]) -> None:
    for dtype in DTYPES:
        tensor = values((3, 5), dtype)
        for dims in (-1, 0, 1):
            for got, expected in zip(
                roll(tensor, dims=dims), stock(tensor, dims=dims), strict=True
            ):
                same(got, expected)


def unpadded_packs_are_as_before(roll: Callable[..., Any], stock: Callable[..., Any]) -> None:
    for drawn in packs():
        pack = Pack(full(drawn.documents), padded=False)
        if not pack.size:
            continue
        for dtype in DTYPES:
            tensor = values((2, pack.size), dtype)
            answers = (r(tensor, packed_seq_params=pack.params) for r in (roll, stock))
            for got, expected in zip(*answers, strict=True):
                same(got, expected)


def stock_is_wrong(stock: Callable[..., Any]) -> None:
    """Assert that the replaced code has the bugs that the page describes."""
    from cppmega.proof.host_sync import HostSyncError, no_host_sync

    pack = Pack([(3, 4), (2, 4)], tail=1)
    tensor = torch.tensor([[1, 2, 3, 9, 4, 5, 9, 9, 7]])
    rolled, total = stock(tensor, packed_seq_params=pack.params)
    assert rolled.tolist() == [[2, 3, 0, 4, 0, 5, 9, 9, 7]]
    assert total.item() == 39  # 10 is right
    with pytest.raises(HostSyncError), no_host_sync():
        stock(tensor, packed_seq_params=pack.params)


def padding_stays_padding(mtp: Any, stock: Any) -> None:
    """The mask is True for padding, and zeros would become tokens for the MoE router."""

    def shifted(module: Any, mask: torch.Tensor, pack: Any) -> torch.Tensor:
        config = SimpleNamespace(mtp_detach_heads=False, sequence_parallel=False)
        ids = torch.zeros(1, 8)
        return module.MultiTokenPredictionLayer._get_embeddings(
            SimpleNamespace(config=config, cp_group=None),
            input_ids=ids,
            position_ids=ids,
            embedding=lambda **_: ids,
            hidden_states=ids,
            packed_seq_params=pack,
            padding_mask=mask,
        )[2]

    mask = torch.tensor([[0, 0, 0, 1, 0, 0, 1, 1]]).bool()
    pack = Pack([(3, 4), (2, 4)]).params
    same(shifted(mtp, mask, pack), mask)
    same(shifted(mtp, mask, None), shifted(stock, mask, None))
    part = mask[:, 4:]  # with sequence parallelism the mask is a slice, whatever the pack says
    assert shifted(mtp, part, pack)[part].all()
