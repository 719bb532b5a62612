"""How much one layer's sparse attention launches, counted as that of its indexer."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from cppmega.ops import dsa_attention  # noqa: E402
from cppmega.ops.common import bits_triton  # noqa: E402
from cppmega.ops.common.bounds import Bounds  # noqa: E402
from cppmega.proof.host_sync import no_host_sync  # noqa: E402
from tests.ops.dsa_indexer.test_dsa_indexer_launches import bounds_of  # noqa: E402
from tests.ops.launch_counts import Launches, kernels_of, modules_of  # noqa: E402

pytestmark = pytest.mark.slow

MODULES = [*modules_of("dsa_attention"), bits_triton]


class Call(NamedTuple):
    """A call, and the most that its forward and its backward may launch.

    Attributes:
        most: launches of forward and backward.
        widths: latent and rotary part; keys and values, per head.
        key_heads: None with one latent key, whose first columns are the value.
        repeatable: the deterministic mode.
    """

    most: tuple[int, int]
    widths: tuple[int, int]
    key_heads: int | None = None
    repeatable: bool = False


CALLS = {
    "absorbed": Call((1, 3), (64, 64)),
    "absorbed, deterministic": Call((1, 9), (64, 64), repeatable=True),
    "wide": Call((1, 7), (512, 64)),
    "wide, deterministic": Call((1, 14), (512, 64), repeatable=True),
    "a key per head": Call((4, 6), (192, 128), key_heads=8),
    "a key and a value for all heads": Call((4, 8), (96, 64), key_heads=1),
}
"""Zeros and a change of type are a launch each, and a prefix sum is two."""


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """The kernels' path, without a GPU."""
    counted = Launches()
    for module in MODULES:
        for name in kernels_of(module):
            monkeypatch.setattr(module, name, counted.recorder(name))
    monkeypatch.setattr(dsa_attention, "obstacle", lambda *call: None)
    return counted


def attention(
    launches: Launches, call: Call, sq: int, batch: int, bounds: Bounds
) -> tuple[list[str], list[str]]:
    """What one layer's attention launches forward and backward; the tensors are not filled."""
    like: dict[str, Any] = {"dtype": torch.bfloat16, "requires_grad": True}
    latent = call.key_heads is None
    width, value = (sum(call.widths), call.widths[0]) if latent else call.widths
    inputs = [
        torch.empty(sq, batch, 8, width, **like),
        torch.empty(sq, batch, call.key_heads or 1, width, **like),
    ]
    if not latent:
        inputs.append(torch.empty(sq, batch, call.key_heads, value, **like))
    indices = torch.empty(batch, sq, 64, dtype=torch.int32)
    last = value if latent else inputs[-1]
    bounds = Bounds(*(x if x is None else x.int() for x in bounds))  # as the page gives them
    launches.taken()
    with no_host_sync(), launches:
        out = dsa_attention.sparse_attention(
            *inputs[:2], last, indices, 0.1, bounds=bounds, repeatable=call.repeatable
        )
        forward = launches.taken()
        torch.autograd.grad(out, inputs, torch.empty_like(out))
        return forward, launches.taken()


@pytest.mark.parametrize("kind", ["causal", "packed", "packed by sequence"])
@pytest.mark.parametrize("name", CALLS)
def test_a_layer_launches_the_same_few_kernels_at_any_size(
    name: str, kind: str, launches: Launches
) -> None:
    call = CALLS[name]
    alone = attention(launches, call, 40, 1, bounds_of(kind, 40, 1))
    assert tuple(map(len, alone)) == call.most, alone
    for sq, batch in ((40, 3), (40, 8), (1000, 3)):
        assert attention(launches, call, sq, batch, bounds_of(kind, sq, batch)) == alone


@pytest.mark.parametrize("name", ["absorbed", "absorbed, deterministic", "a key per head"])
def test_at_the_size_of_the_slice(name: str, launches: Launches) -> None:
    few = attention(launches, CALLS[name], 40, 1, Bounds())
    found = attention(launches, CALLS[name], 4096, 8, Bounds())
    if not CALLS[name].repeatable:
        assert found == few
        return
    # Of the 64 MiB that a sequence contributes, 256 are held at a time.
    assert Counter(found[1]) - Counter(few[1]) == {"_backward_kernel": 1, "_sum_kernel": 1}
    assert len(found[1]) == len(few[1]) + 2


def test_every_kernel_is_launched_by_one_of_these_calls(launches: Launches) -> None:
    seen: set[str] = set()
    for call in CALLS.values():
        seen.update(*attention(launches, call, 40, 1, Bounds()))
    kernels = {name for module in MODULES for name in kernels_of(module)}
    assert kernels <= seen, "a kernel that this test cannot see would not be counted"
