"""MTP's roll on forked ranks: under context parallelism, on packs and on single documents."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import cycle
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support import PATIENCE
from tests.upstream_patches.packed_sequences import DTYPES, LEADS, Pack, packs, same, values


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
