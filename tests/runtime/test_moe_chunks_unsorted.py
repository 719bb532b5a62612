"""When chunks of tokens keep their order, and which groups the products have then."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cppmega.runtime import moe_chunks_unsorted as chunks  # noqa: E402

SIZES = torch.tensor([[3, 1], [0, 4]])
SORTED = SIZES.sum(0)


class Linear:
    """Takes the place of `TEGroupedLinear`."""

    num_gemms = 2


class Mlp:
    """Takes the place of `TEGroupedMLP`."""

    def __init__(self, **changed: Any) -> None:
        self.config = SimpleNamespace(fp8=None, fp4=None)
        self.linear_fc1 = self.linear_fc2 = Linear()
        vars(self).update(changed)


class Subclass(Mlp):
    """Experts that somebody else has changed."""


@pytest.fixture(autouse=True)
def megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, member in ((chunks._EXPERTS, Mlp), (chunks._EXTENSION, Linear)):
        module: Any = ModuleType(name)
        setattr(module, f"TEGrouped{'MLP' if member is Mlp else 'Linear'}", member)
        monkeypatch.setitem(chunks.sys.modules, name, module)
    monkeypatch.setattr(chunks.te_plain_layers, "experts_obstacle", lambda layer, x: None)


def dispatcher(ep: int = 2, experts: int = 2) -> Any:
    made = SimpleNamespace(tp_size=1, ep_size=ep, num_local_experts=experts)
    made.num_global_tokens_per_local_expert = SIZES
    chunks.counts(made, lambda tensor, record_stream: tensor, record_stream=False)
    return made


def test_chunks_of_several_ranks_keep_their_order() -> None:
    own = dispatcher()
    chunks.decide(own, Mlp(), torch.ones(8, 4))
    assert chunks.keeps_order(own)
    assert chunks.splits(own, SORTED).tolist() == [3, 1, 0, 4]


def test_a_single_rank_has_nothing_to_sort() -> None:
    own = dispatcher(ep=1)
    chunks.decide(own, object(), torch.ones(8, 4))  # whatever its experts are
    assert chunks.keeps_order(own)
    assert chunks.splits(own, SORTED) is SORTED


@pytest.mark.parametrize(
    "experts",
    [
        Subclass(),
        object(),
        Mlp(linear_fc2=object()),
        Mlp(_with_fused_impl=True),
        Mlp(config=SimpleNamespace(fp8="hybrid")),
        Mlp(config=SimpleNamespace(fp8=None, fp4="nvfp4")),
    ],
)
def test_other_experts_are_sorted(experts: Any) -> None:
    own = dispatcher()
    chunks.decide(own, Mlp(), torch.ones(8, 4))
    chunks.decide(own, experts, torch.ones(8, 4))  # the call before says nothing about this one
    assert not chunks.keeps_order(own)
    assert chunks.splits(own, SORTED) is SORTED


def test_what_products_alone_do_not_compute_is_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks.te_plain_layers, "experts_obstacle", lambda layer, x: "quantized")
    own = dispatcher()
    chunks.decide(own, Mlp(), torch.ones(8, 4))
    assert not chunks.keeps_order(own)


@pytest.mark.parametrize("own", [dispatcher(experts=1), SimpleNamespace(tp_size=1, ep_size=2)])
def test_other_dispatchers_are_left_alone(own: Any) -> None:
    chunks.decide(own, Mlp(), torch.ones(8, 4))
    assert not chunks.keeps_order(own)


def test_a_layer_computes_chunks_and_leaves_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        chunks.te_plain_layers, "products_of_experts", lambda layer, x, groups: (x, groups)
    )
    assert chunks.products(Linear(), "x", [1, 2]) is None
    assert chunks.products(Linear(), "x", torch.tensor([1, 2])) is None
    assert chunks.products(Linear(), "x", [1, 2, 3, 4]) == ("x", [1, 2, 3, 4])
