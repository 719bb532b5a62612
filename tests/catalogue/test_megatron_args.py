"""Questions about a run's arguments, whichever release has parsed them."""

from __future__ import annotations

from types import SimpleNamespace as Args

import pytest

from cppmega.catalogue import megatron_args


@pytest.mark.parametrize(
    ("args", "pattern"),
    [
        (Args(), ""),
        (Args(hybrid_layer_pattern=None, hybrid_override_pattern=None), ""),
        (Args(hybrid_layer_pattern="M*/D"), "M*/D"),
        (Args(hybrid_layer_pattern=None, hybrid_override_pattern="MM"), "MM"),
    ],
)
def test_layer_pattern(args: Args, pattern: str) -> None:
    assert megatron_args.layer_pattern(args) == pattern


@pytest.mark.parametrize(
    ("args", "dsa"),
    [
        (Args(), False),
        (Args(experimental_attention_variant="dsa"), True),
        (Args(experimental_attention_variant="gated_delta_net"), False),
        (Args(experimental_attention_variant=None, hybrid_layer_pattern="MD"), True),
        (Args(hybrid_layer_pattern="M*"), False),
    ],
)
def test_uses_dsa(args: Args, dsa: bool) -> None:
    assert megatron_args.uses_dsa(args) is dsa


def test_depths_and_experts() -> None:
    for value, answer in ((None, False), (0, False), (2, True)):
        assert megatron_args.has_mtp(Args(mtp_num_layers=value)) is answer
        assert megatron_args.has_experts(Args(num_experts=value)) is answer
    assert not megatron_args.has_mtp(Args()) and not megatron_args.has_experts(Args())


def test_fsdp() -> None:
    for name in ("use_megatron_fsdp", "use_torch_fsdp2"):
        for value in (None, False, True):
            assert megatron_args.uses_fsdp(Args(**{name: value})) is bool(value)
    assert not megatron_args.uses_fsdp(Args())


def test_recomputes() -> None:
    full = Args(recompute_granularity="full", recompute_modules=["layernorm"])
    selective = Args(recompute_granularity="selective", recompute_modules=["layernorm"])
    assert megatron_args.recomputes(full) and not megatron_args.recomputes(full, "layernorm")
    assert megatron_args.recomputes(selective, "layernorm")
    assert not megatron_args.recomputes(selective) and not megatron_args.recomputes(
        selective, "mlp"
    )
    assert not megatron_args.recomputes(Args(recompute_granularity="selective"), "mlp")
    assert not megatron_args.recomputes(Args())


@pytest.mark.parametrize(
    ("args", "how"),
    [
        (Args(), "none"),
        (Args(cuda_graph_impl=None), "none"),
        (Args(cuda_graph_impl="local", enable_cuda_graph=False), "local"),
        (Args(cuda_graph_impl="none", enable_cuda_graph=True), "local"),
        (Args(external_cuda_graph=True, enable_cuda_graph=False), "transformer_engine"),
        (Args(cuda_graph_impl="full_iteration"), "full_iteration"),
    ],
)
def test_cuda_graphs_by_any_name(args: Args, how: str) -> None:
    assert megatron_args.cuda_graphs(args) == how
