"""The indexer's prologue computes what Megatron's lines do, rounded once, or lets them run."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from cppmega.calls import allowing
from cppmega.catalogue import loader as catalogue
from tests.support import VERSIONS, patched, python
from tests.upstream_patches.one_process import PAGES, Stock, assert_passes

NAME = "dsa_indexer_prologue"
VARIANT = "megatron.core.transformer.experimental_attention_variant"


@pytest.mark.parametrize("version", PAGES[NAME])
def test_inputs_and_gradients_are_those_of_stock(version: str) -> None:
    assert_passes(NAME, version)


def check(stock: Stock) -> None:
    """In a process of one version; stock's module is loaded beside the patched one."""
    from importlib import import_module

    import torch

    dsa, theirs = import_module(f"{VARIANT}.dsa"), stock.module(f"{VARIANT}.dsa")
    for case in _cases(hasattr(dsa, "dsa_layout")):
        for dtype in (torch.float32, torch.bfloat16):
            found, want = (_results(module, dtype, **case) for module in (dsa, theirs))
            for ours, other in zip(found, want, strict=True):
                distance = (ours.double() - other.double()).norm() / other.double().norm()
                # Stock rounds cos, sin, products and sums to bf16, ours rounds once.
                assert distance < (1e-6 if dtype == torch.float32 else 1e-2), (case, distance)
            assert dtype == torch.float32 or not torch.equal(found[0], want[0]), case
    _check_declined(dsa, theirs)
    if hasattr(dsa, "dsa_layout"):
        _check_packed_lengths(dsa, theirs)


def _cases(packs: bool) -> list[dict[str, Any]]:
    yarn = {"rope_type": "yarn", "rotary_scaling_factor": 40, "mscale": 1.0, "mscale_all_dim": 0.5}
    cases: list[dict[str, Any]] = [
        {},
        yarn,
        {"rotary_percent": 0.5},
        {"rotary_interleaved": True},
    ]
    if packs:
        cases += [
            {"dsa_indexer_rotate_activation": False, "dsa_indexer_head_dim": 24},
            {"dsa_indexer_rope_interleaved": True, "dsa_indexer_k_norm_fp32": True},
            {"documents": ((0, 4, 12, 24), (0, 10, 16, 24)), "longest": 12},
            {"documents": ((0, 4, 24), (0, 12, 24)), "longest": 24},  # angles for the whole pack
            {"documents": ((0, 8, 48), (0, 24, 48)), "longest": 40, "ranks": (2, 1)} | yarn,
        ]
    return cases


def _results(dsa: Any, dtype: Any, ranks: Any = None, **case: Any) -> list[Any]:
    """Queries, keys and weights, and the gradients of parameters and inputs."""
    import torch

    indexer, packed = _indexer(dsa, dtype, ranks, case)
    torch.manual_seed(1)
    inputs = [torch.randn(24, 1 if packed else 2, n).to(dtype).requires_grad_() for n in (64, 32)]
    found = _inputs_of(dsa, indexer, *inputs, packed)
    upstream = [torch.randn(x.shape).to(dtype) for x in found]
    leaves = [*(p for p in indexer.parameters()), *inputs]
    return [*found, *torch.autograd.grad(found, leaves, upstream)]


def _indexer(dsa: Any, dtype: Any, ranks: Any, case: dict[str, Any]) -> tuple[Any, Any]:
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    from cppmega.proof import small_models

    documents, longest = case.pop("documents", None), case.pop("longest", 0)
    adjacent = case.pop("rotary_interleaved", False)
    case |= {"params_dtype": dtype, "bf16": dtype == torch.bfloat16}
    indexer = small_models.dsa_indexer(dsa, **case)
    indexer.config.rotary_interleaved = adjacent  # which no constructor lets pass beside MLA
    if ranks:
        cp = SimpleNamespace(size=lambda: ranks[0], rank=lambda: ranks[1])
        indexer.pg_collection = SimpleNamespace(cp=cp, tp=indexer.pg_collection.tp)
    if documents is None:
        return indexer, None
    q, k = (torch.tensor(bounds, dtype=torch.int32) for bounds in documents)
    lengths = {"max_seqlen_q": longest, "max_seqlen_kv": longest}
    return indexer, PackedSeqParams(qkv_format="thd", cu_seqlens_q=q, cu_seqlens_kv=k, **lengths)


def _inputs_of(dsa: Any, indexer: Any, hidden: Any, latent: Any, packed: Any) -> Any:
    """With a transform that also takes fp32, as no released package does."""
    from unittest import mock

    from cppmega.proof import small_models

    with mock.patch.object(dsa, "rotate_activation", _transformed):
        return small_models.dsa_index_inputs(indexer, hidden, latent, packed)


def _transformed(x: Any) -> Any:
    from cppmega.ops.pointwise.hadamard import walsh_hadamard

    return walsh_hadamard(x, x.size(-1) ** -0.5)


def _check_declined(dsa: Any, theirs: Any) -> None:
    """Where something else is computed, stock's lines run, with stock's bits, and say why."""
    import warnings
    from unittest import mock

    import torch

    from cppmega.proof import small_models
    from cppmega.runtime import dsa_indexer_prologue as ours

    def taken(module: Any, how: Any) -> Any:
        indexer = small_models.dsa_indexer(module)
        torch.manual_seed(1)
        hidden, latent = (torch.randn(24, 2, n).bfloat16() for n in (64, 32))
        package = mock.patch.object(module, "hadamard_transform", lambda x, scale: x * 2)
        with package, how(module, indexer):
            return small_models.dsa_index_inputs(indexer, hidden, latent)

    def rotation(module: Any, indexer: Any) -> Any:
        return mock.patch.object(module, "rotate_activation", lambda x: x)

    def rope(module: Any, indexer: Any) -> Any:
        return mock.patch.object(indexer, "_apply_rope", lambda x, *rest, **named: x * 2)

    def scaled_rope(module: Any, indexer: Any) -> Any:
        class Scaled(module.DSAIndexer):  # type: ignore[misc, name-defined]
            def _apply_rope(self, x: Any, *rest: Any, **named: Any) -> Any:
                return super()._apply_rope(x * 2, *rest, **named)

        indexer.__class__ = Scaled
        return contextlib.nullcontext()

    def kernel(module: Any, indexer: Any) -> Any:
        # As it may on a GPU.
        return mock.patch.object(ours, "_rotary", side_effect=ours._DeclinedError("it is too wide"))

    reasons = {
        rotation: "rotate_activation is not the Hadamard transform",
        rope: "_apply_rope is not a method of a class",
        scaled_rope: "_apply_rope computes no rotary embedding",
        kernel: "it is too wide",
    }
    for how, reason in reasons.items():
        with allowing(NAME), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found, want = (taken(module, how) for module in (dsa, theirs))
        messages = [str(one.message) for one in said if NAME in str(one.message)]
        assert len(messages) == 1 and reason in messages[0], messages
        assert all(torch.equal(mine, other) for mine, other in zip(found, want, strict=True))


def _check_packed_lengths(dsa: Any, theirs: Any) -> None:
    """Documents that do not fit are refused where stock refuses them, and nobody waits."""
    import torch

    from cppmega.proof.host_sync import no_host_sync

    def of(module: Any, bounds: Any, longest: int, ranks: Any = None) -> Any:
        case = {"documents": (bounds, bounds), "longest": longest}
        indexer, packed = _indexer(module, torch.bfloat16, ranks, case)
        hidden, latent = (torch.ones(24, 1, n).bfloat16() for n in (64, 32))
        return lambda: _inputs_of(module, indexer, hidden, latent, packed)

    for case in (
        ((0, 4, 24), 12),  # a document longer than the angles
        ((0, 4, 23), 24),  # a row that is in no document
        ((0, 4, 28), 28),  # a document of rows that are not there
        ((0, 6, 48), 48, (2, 0)),  # no equal pieces for two ranks
    ):
        for module in (dsa, theirs):
            with pytest.raises((RuntimeError, IndexError, AssertionError)):
                of(module, *case)()
    fits = of(dsa, (0, 4, 24), 20)
    fits()
    with no_host_sync():
        fits()


COMPOSED = """
from unittest import mock

import torch
from megatron.core.transformer.experimental_attention_variant import dsa

from cppmega.runtime import dsa_indexer_prologue
from cppmega.proof import small_models
from cppmega.guard import installed

dsa.hadamard_transform = None  # as where the package cannot be imported
hidden, latent = (torch.randn(24, 2, n).bfloat16() for n in (64, 32))
for adjacent in (False, True):
    indexer = small_models.dsa_indexer()
    indexer.config.rotary_interleaved = adjacent  # no constructor lets it pass beside MLA
    found = small_models.dsa_index_inputs(indexer, hidden, latent)
    assert installed.reached() == set(PAGES), installed.reached()
    with mock.patch.object(dsa_indexer_prologue, "find_rotary", return_value=None):
        others = small_models.dsa_index_inputs(indexer, hidden, latent)
    for ours, theirs in zip(found, others):
        assert 0 <= (ours - theirs).norm() < 1e-2 * theirs.norm()
    assert not torch.equal(found[0], others[0])

# A call that is declined has not passed through the page.
installed.REACHED.clear()
dsa._CPPMEGA_REACHED.clear()
with mock.patch.object(dsa_indexer_prologue, "find_rotary", return_value=None):
    small_models.dsa_index_inputs(indexer, hidden, latent)
assert installed.reached() == set(PAGES) - {"dsa_indexer_prologue"}
"""


@pytest.mark.parametrize(
    "version, others",
    [
        ("0.18.2", ("dsa_indexer_rope", "dsa_hadamard_transform")),
        ("0.19.2", ("dsa_hadamard_transform",)),
    ],
)
def test_computes_what_the_other_pages_do(version: str, others: tuple[str, ...]) -> None:
    pages = (*others, NAME)
    done = python(patched(version, *pages), f"PAGES = {pages}\n{COMPOSED}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "reached"),
    [
        ({}, True),
        ({"dsa_indexer_head_dim": 96}, False),
        ({"dsa_indexer_head_dim": 96, "dsa_indexer_rotate_activation": False}, False),
        ({"dsa_indexer_head_dim": 192, "dsa_indexer_rotate_activation": False}, True),
        ({"qk_pos_emb_head_dim": 48}, False),
        ({"rotary_percent": 0.75}, False),
        ({"apply_rope_fusion": True}, False),
        ({"experimental_attention_variant": None}, False),
    ],
)
def test_when_a_run_must_reach_it(arguments: dict[str, object], reached: bool) -> None:
    page = catalogue.load()[NAME]
    given = {
        **{"experimental_attention_variant": "dsa", "dsa_indexer_head_dim": 128},
        **{"qk_pos_emb_head_dim": 64, "rotary_percent": 1.0},
    }
    assert page.patch.when is not None
    assert page.patch.when(SimpleNamespace(**(given | arguments))) is reached


def test_every_version_is_checked() -> None:
    assert PAGES[NAME] == VERSIONS
