"""DSA is bitwise that of stock, forward and backward, and the host reads nothing of it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.support import patched, pristine, python
from tests.upstream_patches import one_process
from tests.upstream_patches.dsa import dsa_layers

torch = pytest.importorskip("torch")

PAGE, ROPE = "dsa_no_host_sync", "rope_thd_no_host_sync"
BESIDE = (
    *("dsa_attention_kernels", "dsa_indexer_kernels"),
    *("dsa_indexer_loss_metric", "dsa_indexer_prologue"),
)
"""The other pages that change what a DSA layer does; their kernels decline meta tensors."""
VERSION = "0.19.2"
FOLDER = "megatron.core.transformer.experimental_attention_variant"
READS = """
import itertools, json, warnings
from tests.upstream_patches.recomputation import beside_pages

warnings.simplefilter("ignore")
first_read = beside_pages("_dsa_host_reads", "dsa").first_read
plans = {
    "trained": {},
    "sparse": {"dsa_indexer_use_sparse_loss": True},
    "recomputed": {"recompute": True},
    "evaluated": {"train": False},
    "a key per head": {"absorbed": False},
}
found = {}
for context, packed, plan in itertools.product((1, 2), (False, True), plans):
    case = f"{plan}, CP {context}{', packed' * packed}"
    found[case] = first_read(context, packed, rope=True, **plans[plan])
print(json.dumps(found))
"""
BOTH = """
cases = {
    "plain": {},
    "sparse": dict(sparse=True),
    "recomputed": dict(recompute=True),
    "evaluation": dict(train=False),
    "a key per head": dict(absorbed=False, sparse=True),
    "packed": dict(packed=(8, 12, LENGTH)),
    "packed sparse": dict(packed=(8, 12, LENGTH), sparse=True),
    "packed, empty sequences": dict(packed=(8, 8, 20, 20, LENGTH, LENGTH)),
    "packed, one sequence": dict(packed=(LENGTH,)),
}
answers = {name: run(**case) for name, case in cases.items()}
rows = (LENGTH, LENGTH + 2)[of_context]
group = parallel_state.get_context_parallel_group()
try:
    dsa._validate_nonpacked_cp_uniform_length(rows, rows, 2, group, torch.device("cpu"))
except RuntimeError as refused:
    answers["unequal lengths"] = {"refused": str(refused)}
print(json.dumps(answers))
"""


def reads(root: Path) -> dict[str, str]:
    done = python(root, READS)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.megatron
def test_nothing_is_read_on_the_host() -> None:
    ours = reads(patched(VERSION, PAGE, ROPE, *BESIDE))
    assert set(ours.values()) == {""}, ours
    stock = reads(patched(VERSION, ROPE))
    # Without context parallelism stock fills a number in the backward of the loss, and no more.
    clean = {case for case, read in stock.items() if not read}
    assert clean == {"evaluated, CP 1", "evaluated, CP 1, packed"}


@pytest.mark.megatron
def test_context_parallel_results_are_stock_s_to_the_bit() -> None:
    for ours, stock in zip(*map(ranks, (patched(VERSION, PAGE), pristine(VERSION))), strict=True):
        for refused in (ours, stock):  # on every rank, and without a hang
            said = refused.pop("unequal lengths")["refused"]
            assert "expects uniform per-rank sequence lengths" in said
        for answer in ours.values():
            answer["reached"] = []
        assert ours == stock


def ranks(root: Path) -> list[dict[str, Any]]:
    found = dsa_layers.answers(root, BOTH, context=2)
    assert len(found) == 2
    return found


@pytest.mark.megatron
def test_functions() -> None:
    one_process.assert_passes(PAGE, VERSION)


def check(stock: one_process.Stock) -> None:
    from megatron.core.transformer.experimental_attention_variant import dsa_layout
    from megatron.core.transformer.experimental_attention_variant.ops import tilelang_dsa

    unpatched = stock.module(f"{FOLDER}.dsa_layout")
    packed_positions(dsa_layout, unpatched)
    uneven_positions(dsa_layout, unpatched)
    indexer_layouts(dsa_layout, unpatched)
    scratch_in_a_graph(tilelang_dsa, stock.module(f"{FOLDER}.ops.tilelang_dsa"))


def outcome(function: Any, *args: Any, **kwargs: Any) -> Any:
    """What a function returns as a list, or the type of its error."""
    try:
        return function(*args, **kwargs).tolist()
    except (RuntimeError, ValueError) as error:
        return type(error)


def packed_positions(ours: ModuleType, theirs: ModuleType) -> None:
    bounds = ([0, 8], [0, 8, 12, 24], [0, 0, 8, 8, 24, 24], [0, 16, 0, 0], [0, 4, 8, 9], [0, 2, 10])
    seen = 0
    for ends, size, covers in itertools.product(bounds, (None, 0, 3, 4, 12, 16), (False, True)):
        for ranks in (1, 2, 4):
            for rank in range(ranks):
                args = (torch.tensor(ends, dtype=torch.int32), ranks, rank, torch.device("cpu"))
                how = {"output_size": size, "cu_seqlens_cover_output": covers}
                want = outcome(theirs.build_packed_allgather_cp_local_positions, *args, **how)
                got = outcome(ours.build_packed_allgather_cp_local_positions, *args, **how)
                assert got == want, (ends, ranks, rank, how, got, want)
                seen += isinstance(want, list)
    assert seen > 200
    # Without any token stock has no positions, and then fails because there must be some.
    args = (torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32), 2, 0)
    for module in (ours, theirs):
        assert RuntimeError is outcome(
            module.build_packed_allgather_cp_query_positions_and_key_reorder,
            *(*args, torch.device("cpu"), 4, 4, 8),
        )


def uneven_positions(ours: ModuleType, theirs: ModuleType) -> None:
    def all_gather(out: list[Any], mine: Any, group: Any = None) -> None:
        for tensor, length in zip(out, (3, 5, 6), strict=True):
            tensor.fill_(length)

    for rank in range(3):
        group = SimpleNamespace(size=lambda: 3, rank=lambda r=rank: r)
        positions = []
        for module in (ours, theirs):
            with (
                mock.patch.object(torch.distributed, "is_initialized", lambda: True),
                mock.patch.object(torch.distributed, "all_gather", all_gather),
            ):
                positions += module.get_cp_positions_from_layout(
                    (3, 5, 6)[rank], 14, 3, rank, "allgather", torch.device("cpu"), group
                )
        for got, want in zip(positions[:2], positions[2:], strict=True):
            assert got.dtype == want.dtype and torch.equal(got, want)


def indexer_layouts(ours: ModuleType, theirs: ModuleType) -> None:
    for ends, size, local in (([0, 16], 8, True), ([0, 16], 16, False), ([0, 8, 24], 24, False)):
        bounds = torch.tensor(ends, dtype=torch.int32)
        for rank in range(2):
            how = {"cp_size": 2, "cp_rank": rank, "key_size": size, "local_key_layout": local}
            got = vars(ours.build_packed_cp_indexer_layout(bounds, bounds, **how))
            want = vars(theirs.build_packed_cp_indexer_layout(bounds, bounds, **how))
            assert got.keys() == want.keys()
            for name in want:
                assert got[name].dtype == want[name].dtype and torch.equal(got[name], want[name])


def scratch_in_a_graph(ours: ModuleType, theirs: ModuleType) -> None:
    def buffer(module: ModuleType, capturing: bool) -> Any:
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: capturing):
            return module._get_scratch_buffer("a", (2, 3), torch.float32, torch.device("meta"))

    for module, cached_in_graphs in ((ours, False), (theirs, True)):
        eager = buffer(module, False)
        first, second = buffer(module, True), buffer(module, True)
        assert buffer(module, False) is eager
        assert (first is eager, second is eager, first is second) == (cached_in_graphs,) * 3
        assert first.shape == eager.shape and first.dtype == eager.dtype
