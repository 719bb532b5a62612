"""Megatron's own module of hyper-connections computes with the kernels what the reference does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from cppmega.errors import CppmegaError  # noqa: E402
from cppmega.features.mhc import connections as mhc  # noqa: E402
from cppmega.ops import mhc as kernels  # noqa: E402
from cppmega.ops.mhc import naive as reference  # noqa: E402
from cppmega.runtime import mhc_fused_kernels as mhc_in_megatron  # noqa: E402
from tests.ops.in_interpreter import run  # noqa: E402

N, C = 2, 16


def module(dropout: float = 0.0, eps: float = 1e-6) -> Any:
    """What the functions read of a `HyperConnectionModule` of dev, and its `aggregate`."""
    torch.manual_seed(0)
    learned = torch.nn.Linear(N * C, N * (N + 2), bias=False)
    alphas = {f"alpha_{name}": torch.rand(1) for name in ("pre", "post", "res")}
    given = torch.nn.ParameterDict({**alphas, "bias": torch.randn(N * (N + 2))})
    built = SimpleNamespace(
        config=SimpleNamespace(
            params_dtype=torch.float32, hidden_dropout=dropout, gradient_accumulation_fusion=True
        ),
        training=True,
        n=N,
        hidden_size=C,
        sinkhorn_iterations=3,
        **{"sinkhorn_eps": 1e-6, "compute_h_eps": eps, "norm_eps": 1e-6},
        mapping_proj=learned,
        **dict(given.items()),
    )
    built.aggregate = lambda streams, h_pre: built._h_aggregate_op(mhc.split(streams, N), h_pre)
    return built


def test_a_model_that_no_kernel_computes_is_refused() -> None:
    with pytest.raises(CppmegaError) as error:
        mhc_in_megatron.use_kernels(module())
    assert error.value.name == "no-kernel"


def test_other_epsilons_than_the_kernels_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "obstacle", lambda *sizes: None)
    with pytest.raises(ValueError, match="epsilons"):
        mhc_in_megatron.use_kernels(module(eps=1e-5))


def site(built: Any, streams: Tensor, recomputes: bool) -> Tensor:
    """A site around a sine; Megatron calls the ops apart where it recomputes, and gives storage."""
    if recomputes:
        h_pre, h_post, h_res = mhc_in_megatron.weights(built, streams)
        storage = torch.empty(*streams.shape[:2], C)
        x = built._h_aggregate_into_op(mhc.split(streams, N), h_pre, storage)
        assert x.data_ptr() == storage.data_ptr()
        residual = streams
    else:
        x, h_res, h_post, residual = mhc_in_megatron.read(built, streams)
    found: Tensor = built._h_post_bda_op(h_res, mhc.split(residual, N), h_post, x.sin(), None)
    return found


def check(dropout: float, recomputes: bool, accumulates: bool) -> None:
    """A site on the interpreted kernels against the reference; both gradients of phi are asked."""
    built = module(dropout)
    mhc_in_megatron.use_kernels(built)
    phi = built.mapping_proj.weight
    if accumulates:
        phi.main_grad, phi.grad_added_to_main_grad = torch.ones_like(phi), False
    streams = torch.randn(3, 2, N * C, requires_grad=True)
    factors = torch.randn(3, 2, N, C)
    inputs = streams, *mhc.learned(built)
    found = site(built, streams, recomputes)
    mine = list(torch.autograd.grad(found, inputs, factors))
    if accumulates:
        assert phi.grad_added_to_main_grad
        mine[1] = phi.main_grad - 1

    h_pre, h_post, h_res = reference.weights(
        mhc.split(streams, N), reference.Parameters(*inputs[1:]), built.sinkhorn_iterations
    )
    out = reference.aggregate(mhc.split(streams, N), h_pre).sin()
    want = reference.update(mhc.split(streams, N), h_res, h_post, out)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        mine, list(torch.autograd.grad(want, inputs, factors)), rtol=1e-4, atol=1e-4
    )


def test_a_site_on_kernels_is_that_of_the_reference() -> None:
    run(
        """
from tests.runtime.test_mhc_fused_kernels import check

check(0.0, False, False)
check(0.0, True, True)
check(0.0, False, True)
check(0.5, False, False)
"""
    )
