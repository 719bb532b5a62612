"""How much one layer's indexer launches, counted on CPU: kernels by recorders, torch's by dispatch.

Megatron 0.19 launches 731 kernels forward and about 300 backward at a batch of 8: it loops over the
batch and over chunks of 512 rows.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from cppmega.ops import dsa_indexer  # noqa: E402
from cppmega.ops.common import scaled_triton  # noqa: E402
from cppmega.ops.common.bounds import Bounds  # noqa: E402
from cppmega.ops.dsa_indexer import tiles_triton  # noqa: E402
from cppmega.ops.dsa_indexer.problem import Loss  # noqa: E402
from cppmega.ops.pointwise import dsa_indexer_prologue  # noqa: E402
from cppmega.ops.pointwise.dsa_indexer_prologue import Rotary, prepare_index_inputs  # noqa: E402
from cppmega.proof.host_sync import no_host_sync  # noqa: E402
from tests.ops.launch_counts import Launches, kernels_of, modules_of  # noqa: E402
from tests.ops.pointwise.dsa_indexer_prologue_checks import angles  # noqa: E402

pytestmark = pytest.mark.slow

LIMIT = 25
"""Launches of one layer's indexer, forward and backward each."""
MODULES = [
    *modules_of("common", "bits"),
    *modules_of("dsa_indexer"),
    *modules_of("pointwise", "dsa_indexer"),
]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """The kernels' path, without a GPU."""
    counted = Launches()
    for module in (*MODULES, scaled_triton):
        for name in kernels_of(module):
            monkeypatch.setattr(module, name, counted.recorder(name))
    for module in (dsa_indexer, dsa_indexer_prologue):
        monkeypatch.setattr(module, "obstacle", lambda *call: None)
    return counted


def bounds_of(kind: str, sq: int, batch: int) -> Bounds:
    """Causal, or packed documents with the bounds of each row, as Megatron's int64."""
    if kind == "causal":
        return Bounds()
    row = torch.arange(sq)
    starts, ends = row // 5 * 5, row + 1
    if kind == "packed":
        return Bounds(starts, ends)
    return Bounds(starts.expand(batch, sq), ends.expand(batch, sq))


def layer(
    launches: Launches, sq: int, batch: int, bounds: Bounds, how: dict[str, Any] | None
) -> tuple[list[str], list[str]]:
    """One layer's indexer, prologue and loss included: what it launches forward and backward.

    The tensors are not filled: large ones cost no memory.

    Args:
        launches: the recorders.
        sq: length of the sequence, for keys as well.
        batch: number of sequences.
        bounds: valid keys.
        how: of the loss, and the key heads; None: the choice alone, as in evaluation.
    """
    heads, width = 32, 64
    like: dict[str, Any] = {"dtype": torch.bfloat16}
    made = (
        torch.empty(sq, batch, heads, width, **like).requires_grad_(),
        torch.empty(sq, batch, width, **like).requires_grad_(),
        torch.empty(sq, batch, heads, **like).requires_grad_(),
    )
    query = torch.empty(sq, batch, 32, 128, **like)
    key = torch.empty(sq, batch, (how or {}).get("key_heads", 1), 128, **like)
    rotary = Rotary(angles=angles(sq, 32))
    rows = torch.ones(batch, sq, dtype=torch.bool)
    launches.taken()
    with no_host_sync(), launches:
        ready = prepare_index_inputs(*made, rotary)
        if how is None:
            dsa_indexer.choose_keys(*ready, 256, bounds=bounds)
            return launches.taken(), []
        terms = {name: value for name, value in how.items() if name != "key_heads"}
        loss = Loss(softmax_scale=1.0, coefficient=1.0, **terms)
        found = dsa_indexer.indexer_loss(*ready, query, key, 256, loss, bounds=bounds, rows=rows)
        forward = launches.taken()
        torch.autograd.grad(found.loss, made, torch.ones(()))
        return forward, [name for name in launches.taken() if name != "ones"]


CALLS: dict[str, dict[str, Any] | None] = {
    "choice": None,
    "sparse": {"sparse": True},
    "sparse, repeatable": {"sparse": True, "repeatable": True},
    "sparse, a key per head": {"sparse": True, "key_heads": 32},
    "dense": {"sparse": False},
    "dense, per token": {"sparse": False, "per_token": True},
}


@pytest.mark.parametrize("kind", ["causal", "packed", "packed by sequence"])
@pytest.mark.parametrize("call", CALLS)
def test_a_layer_launches_the_same_few_kernels_at_any_batch(
    call: str, kind: str, launches: Launches
) -> None:
    alone = layer(launches, 40, 1, bounds_of(kind, 40, 1), CALLS[call])
    assert 0 < len(alone[0]) <= LIMIT and len(alone[1]) <= LIMIT, alone
    assert bool(alone[1]) == (call != "choice")
    for sq, batch in ((40, 3), (40, 8), (1000, 3)):
        assert layer(launches, sq, batch, bounds_of(kind, sq, batch), CALLS[call]) == alone


@pytest.mark.parametrize("call", CALLS)
def test_at_the_size_of_the_slice(call: str, launches: Launches) -> None:
    few = layer(launches, 40, 1, Bounds(), CALLS[call])
    assert layer(launches, 4096, 8, Bounds(), CALLS[call]) == few


BY_PART = {
    "dense": (2, ("_tile_kernel", "_query_kernel", "_key_kernel")),
    "sparse, a key per head": (
        4, ("new_zeros", "_bits_kernel", "_lse_kernel", "_tile_kernel", "_gather_kernel"),
    ),
}  # fmt: skip
"""Bytes of an element of `[b, sq, sk]`, and what is launched for each part of the queries."""


@pytest.mark.parametrize(("sq", "batch"), [(4096, 64), (32768, 1)])
@pytest.mark.parametrize("call", BY_PART)
def test_beyond_half_a_gigabyte_a_loss_is_computed_in_parts(
    call: str, sq: int, batch: int, launches: Launches
) -> None:
    one, backward = layer(launches, 40, 1, Bounds(), CALLS[call])
    several, same = layer(launches, sq, batch, Bounds(), CALLS[call])
    size, names = BY_PART[call]
    parts, by_part = size * batch * sq * sq // 2**29, Counter(names)
    more = {name: count * (parts - 1) for name, count in by_part.items()}
    assert Counter(several) - Counter(one) == more and same == backward


@pytest.mark.parametrize(("ranks", "most"), [(1, 1.0), (2, 1.5)])
@pytest.mark.parametrize("call", BY_PART)
def test_parts_do_not_hold_memory_at_the_same_time(
    call: str, ranks: int, most: float, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several ranks, the target of a part and its G exist together."""
    made: list[weakref.ref[torch.Tensor]] = []
    sizes: list[int] = []
    scratch = tiles_triton.IndexTiles.scratch

    def recorded(tiles: Any, part: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        new = scratch(tiles, part, dtype)
        made.append(weakref.ref(new))
        sizes.append(sum(x.nbytes for x in (one() for one in made) if x is not None))
        return new

    monkeypatch.setattr(tiles_triton.IndexTiles, "scratch", recorded)
    monkeypatch.setattr(Loss, "ranks", lambda loss: ranks)
    monkeypatch.setattr(Loss, "add_up", lambda loss, target: target)
    layer(launches, 32768, 1, Bounds(), CALLS[call])
    assert len(made) > 2 and 0 < max(sizes) <= most * tiles_triton.G_BYTES


def test_every_kernel_is_launched_by_one_of_these_calls(launches: Launches) -> None:
    seen = set()
    for how in CALLS.values():
        for names in layer(launches, 40, 1, Bounds(), how):
            seen |= set(names)
    kernels = {name for module in MODULES for name in kernels_of(module)}
    assert kernels <= seen, "a kernel that this test cannot see would not be counted"
