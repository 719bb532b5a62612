"""Compare MTP's roll with plain loops over documents, on 1, 2 and 4 ranks.

The checks run in one process per version, which imports the patched tree, loads the unpatched file
as well, and forks the ranks: importing megatron-core takes longer than all of them.
"""

from __future__ import annotations

import ast
import importlib.util
import multiprocessing
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.support import PATIENCE, patched, pristine, python

torch = pytest.importorskip("torch")

PAGE = "mtp_roll_packed_sequences"
FILE = "megatron/core/transformer/multi_token_prediction.py"
DTYPES = (torch.int64, torch.float32, torch.bool, torch.int32, torch.bfloat16)
LEADS = ((), (1,), (2,), (1, 3), (1,))


@pytest.mark.megatron
@pytest.mark.parametrize("version", ["0.15.3", "0.16.1", "0.19.2"])
def test_roll(version: str) -> None:
    code = f"""
    from tests.upstream_patches import test_{PAGE} as here
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


class Pack:
    """Documents with real and padded lengths, followed by a tail."""

    def __init__(self, documents: list[tuple[int, int]], tail: int = 0, padded: bool = True):
        self.documents, self.tail = documents, tail
        self.ends = [0]
        real = [0]
        for length, slots in documents:
            real.append(real[-1] + length)
            self.ends.append(self.ends[-1] + slots)
        self.size = self.ends[-1] + tail
        self.params = SimpleNamespace(
            cu_seqlens_q=torch.tensor(real, dtype=torch.int32),
            cu_seqlens_q_padded=torch.tensor(self.ends, dtype=torch.int32) if padded else None,
        )

    def rolled(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the reference, computed token by token."""
        out = torch.zeros_like(tensor)
        for (length, _), start in zip(self.documents, self.ends, strict=False):
            for at in range(start, start + length - 1):
                out[..., at] = tensor[..., at + 1]
        return out

    def part(self, tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        """Return a rank's slots in Transformer Engine's order: pieces r and 2n-1-r per document."""
        slots = []
        for (_, length), start in zip(self.documents, self.ends, strict=False):
            if length < 2 * size:  # TE refuses it; one token per rank is all that can be meant
                slots += [start + rank] * (length // size)
                continue
            piece = length // (2 * size)
            for first in (start + rank * piece, start + (2 * size - 1 - rank) * piece):
                slots += range(first, first + piece)
        tail = self.tail // size
        slots += range(self.ends[-1] + rank * tail, self.ends[-1] + (rank + 1) * tail)
        return tensor[..., slots]


def packs(multiple: int = 1, seed: int = 0) -> Iterator[Pack]:
    """Return packs: an example, extremes, and random ones whose padded lengths are multiples."""
    whole = 2 * multiple if multiple > 1 else 1
    if multiple == 1:
        yield Pack([(3, 4), (2, 4)])
        yield Pack([])
        yield Pack([(0, 0), (1, 1), (0, 0), (0, 3), (2, 2), (0, 0)])
    yield Pack([], tail=3 * multiple)
    yield Pack([(1, whole)] * 5, tail=whole)
    draw = random.Random(seed)
    for _ in range(30 if multiple == 1 else 12):
        documents = []
        for _ in range(draw.randrange(1, 7)):
            slots = draw.choice((0, 1, 1, 2, 5)) * whole
            documents.append((draw.randint(0, slots), slots))
        if multiple > 1 and draw.random() < 0.3:  # a local piece of one token
            documents.append((multiple, multiple))
        pack = Pack(documents, tail=draw.choice((0, 0, 2 * multiple)))
        # Documents that fill exactly one rank's share look like the boundaries of a share.
        if multiple == 1 or pack.size == 0 or pack.ends[-1] * multiple != pack.size:
            yield pack


def full(documents: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(slots, slots) for _, slots in documents]


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(shape, generator=draw) < 0.5
    if dtype.is_floating_point:
        return torch.randn(shape, generator=draw).to(dtype)
    return torch.randint(1, 1000, shape, generator=draw, dtype=dtype)


def same(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape, (got, expected)
    assert got.equal(expected), (got, expected)


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


def in_ranks(world: int, function: Callable[..., None], *arguments: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        fork = multiprocessing.get_context("fork")
        ranks = [
            fork.Process(target=rank_main, args=(f"{folder}/store", world, r, function, arguments))
            for r in range(world)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(PATIENCE)
        codes = [rank.exitcode for rank in ranks]
        for rank in ranks:
            rank.kill()
    assert codes == [0] * world, codes


def rank_main(store: str, world: int, rank: int, function: Callable[..., None], args: Any) -> None:
    torch.cuda.current_device = lambda: "cpu"  # stock allocates there
    shared = torch.distributed.FileStore(store, world)
    torch.distributed.init_process_group("gloo", store=shared, world_size=world, rank=rank)
    try:
        function(*args)
    finally:
        shared.set(f"ended {rank}", "")
    # A rank that exits closes its connections, so ranks that still send to it would fail. This is
    # not a barrier, whose messages could be matched with those that a failed call left pending.
    shared.wait([f"ended {other}" for other in range(world)], timedelta(seconds=PATIENCE))


def on_every_rank(roll: Callable[..., Any], stock: Callable[..., Any], backport: bool) -> None:
    world, me = torch.distributed.get_world_size(), torch.distributed.get_rank()
    everybody = torch.distributed.group.WORLD
    context_parallel(roll, everybody)
    if world == 4:
        # Two groups side by side whose packs differ: nothing may cross from one to the other.
        pairs = [torch.distributed.new_group(ranks) for ranks in ([0, 2], [3, 1])]
        context_parallel(roll, pairs[me % 2], seed=me % 2)
    as_before(roll, stock, everybody, backport)
    refuses_a_pack_split_as_one_sequence(roll, everybody)
    refuses_the_boundaries_of_a_share(roll, everybody)
    stock_breaks_on_one_token(stock, everybody)  # it leaves messages behind: last


def context_parallel(roll: Callable[..., Any], group: Any, seed: int = 0) -> None:
    from cppmega.proof.host_sync import no_host_sync

    size, rank = group.size(), torch.distributed.get_rank(group)
    for pack, (lead, dtype) in zip(packs(size, seed), cycle(zip(LEADS, DTYPES, strict=True))):
        tensor = values((*lead, pack.size), dtype)
        with no_host_sync(), exchanges(group) as batches:
            rolled, total = roll(
                pack.part(tensor, rank, size), cp_group=group, packed_seq_params=pack.params
            )
        expected = pack.part(pack.rolled(tensor), rank, size)
        same(rolled, expected)
        same(total, expected.sum())
        assert len(batches) <= 1, "one exchange for all documents"
    for length in (size, 2 * size, 10 * size):
        document = Pack([(length, length)])
        for dims, dtype in zip((0, 1, -1, -2, 1), DTYPES, strict=True):
            tensor = values((3, length), dtype)
            mine = document.part(tensor, rank, size)
            expected = document.part(document.rolled(tensor), rank, size)
            if dims in (0, -2):
                mine, expected = mine.T.contiguous(), expected.T
            with no_host_sync(), exchanges(group) as batches:
                rolled, total = roll(mine, dims=dims, cp_group=group)
            same(rolled, expected)
            same(total, expected.sum())
            assert len(batches) == 1


def refuses_a_pack_split_as_one_sequence(roll: Callable[..., Any], group: Any) -> None:
    """`--dataloader-inter-document-masking` splits the sequence regardless of its documents."""
    size = group.size()
    documents = Pack([(3, 3), (10 * size - 8, 10 * size - 8), (5, 5)], padded=False)
    mine = torch.arange(documents.size // size)
    with pytest.raises(RuntimeError, match="mtp_roll_packed_sequences: MTP under context"):
        roll(mine, cp_group=group, packed_seq_params=documents.params)


def refuses_the_boundaries_of_a_share(roll: Callable[..., Any], group: Any) -> None:
    """They are as divisible as those of the whole pack, and end at half of its documents."""
    from cppmega.proof.host_sync import no_host_sync

    size = group.size()
    whole = Pack([(2 * size**2, 2 * size**2)] * 2, padded=False)
    mine = torch.arange(whole.size // size)
    share = SimpleNamespace(
        cu_seqlens_q=whole.params.cu_seqlens_q // size, cu_seqlens_q_padded=None
    )
    with pytest.raises(RuntimeError, match="cu_seqlens of the whole pack"), no_host_sync():
        roll(mine, cp_group=group, packed_seq_params=share)
    beyond = SimpleNamespace(
        cu_seqlens_q=whole.params.cu_seqlens_q * size, cu_seqlens_q_padded=None
    )
    with pytest.raises(RuntimeError, match="cu_seqlens of the whole pack"):
        roll(mine, cp_group=group, packed_seq_params=beyond)


@contextmanager
def exchanges(group: Any) -> Iterator[list[int]]:
    """Return the sizes of the batches of messages, all of which must stay within the group."""
    batches: list[int] = []
    real = torch.distributed.batch_isend_irecv

    def batch(ops: list[Any]) -> list[Any]:
        assert all(op.group is group for op in ops)
        batches.append(len(ops))
        return real(ops)

    alone = mock.Mock(side_effect=AssertionError("a message outside of a batch"))
    with (
        mock.patch.object(torch.distributed, "batch_isend_irecv", batch),
        mock.patch.object(torch.distributed, "all_gather", alone),
    ):
        yield batches


def as_before(
    roll: Callable[..., Any], stock: Callable[..., Any], group: Any, backport: bool
) -> None:
    """Without padding and without a tail, stock is correct under context parallelism too."""
    size, rank = group.size(), torch.distributed.get_rank(group)
    for dtype in DTYPES:
        tensor = values((2, 6 * size), dtype)
        for got, expected in zip(*(r(tensor, cp_group=group) for r in (roll, stock)), strict=True):
            same(got, expected)
    if backport:
        return
    for slots in ([2], [6, 2, 2], [4, 8, 2, 4]):
        pack = Pack([(count * size, count * size) for count in slots], padded=False)
        tensor = pack.part(values((2, pack.size), torch.float32), rank, size)
        answers = (r(tensor, cp_group=group, packed_seq_params=pack.params) for r in (roll, stock))
        for got, expected in zip(*answers, strict=True):
            same(got, expected)


def stock_breaks_on_one_token(stock: Callable[..., Any], group: Any) -> None:
    with pytest.raises(IndexError):
        stock(torch.ones(1, 1), cp_group=group)
