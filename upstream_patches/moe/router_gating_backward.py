"""Compute the backward of a router's scores in one kernel.

What: With `--moe-router-dtype fp32`, `RouterGatingLinearFunction` takes its gradients on a GPU from
    `cppmega.ops.pointwise.router_gating`. A call that the kernel does not support ends the run with
    the reason, or, with `--allow-fallback router_gating_backward` and in runs with more than 128
    experts, is computed by Megatron's code. Without `--moe-router-dtype fp32` nothing changes.
Why: Megatron casts the hidden states to fp32 in every layer, multiplies them in TF32, and casts the
    gradient back: 24 of 2,800 ms of kernels in a step of NAM56R on two H200, for products of 16
    columns. The kernel takes 5.8.
Upstream: Not sent: measured as part of a step on one host of two H200.
Remove: when upstream no longer casts the hidden states for it.
Numerics: reorders sums: products have the precision of fp32, where Transformer Engine's are TF32
"""

from typing import Any

from cppmega.catalogue.megatron_args import has_experts
from cppmega.edits import inserting
from cppmega.page import Edit, Patch, Source

TARGET = "megatron/core/transformer/moe/moe_utils.py:RouterGatingLinearFunction.backward"


MOST_EXPERTS = 128


def in_fp32(args: Any) -> bool:
    """Whether the model's routers compute scores in fp32, of as many experts as the kernel does."""
    few = has_experts(args) and args.num_experts <= MOST_EXPERTS
    return few and getattr(args, "moe_router_dtype", None) == "fp32"


PATCH = Patch(
    purpose="speed",
    edits=(
        Edit(
            target=TARGET,
            pins={
                "0.15.3": "9657a929dece781b",
                "0.16.1": "6b498a6e8e105950",
                "0.17.1": "6b498a6e8e105950",
                "0.18.2": "6b498a6e8e105950",
                "0.19.2": "6b498a6e8e105950",
            },
            edit=inserting(
                """
                # Scores have the type of the hidden states unless another one is asked for.
                asked = inp.is_cuda and ctx.router_dtype == torch.float32 != inp.dtype
                reason = _cppmega_gating.obstacle(inp, weight, grad_output) if asked else None
                if asked and _cppmega_served(
                    "router_gating_backward", reason, inp=inp, weight=weight, given=grad_output
                ):
                    grad_input, grad_weight = _cppmega_gating.gradients(inp, weight, grad_output)
                    grad_bias = None if bias is None else grad_output.sum(dim=0).to(bias.dtype)
                    return grad_input.view(*inp_shape), grad_weight, grad_bias, None
                """,
                after="grad_output = grad_output.view(-1, grad_shape[-1])",
            ),
            imports=(
                "from cppmega.calls import served as _cppmega_served",
                "from cppmega.ops.pointwise import router_gating as _cppmega_gating",
            ),
        ),
    ),
    reached="backward",
    when=in_fp32,
)


def fixed_upstream(source: Source) -> bool:
    return False  # no code shows whether a kernel elsewhere is faster


def verify() -> None:
    import warnings
    from unittest import mock

    import torch
    from megatron.core.transformer.moe import moe_utils

    from cppmega.calls import allowing
    from cppmega.ops.pointwise import router_gating_naive as router_gating_reference
    from cppmega.proof import stand_ins

    bf16, fp32, fp64 = torch.bfloat16, torch.float32, torch.float64
    launched = []

    def gradients(inp, weight, given, of_inp, parts):  # type: ignore[no-untyped-def]
        assert all(each.is_contiguous() for each in (inp, weight, given, of_inp, parts))
        launched.append(parts.dtype)
        of_inp.copy_(router_gating_reference.gradients(inp, weight, given)[0])
        for part, rows in zip(parts, (slice(2), slice(2, None)), strict=True):
            part.copy_(given[rows].t() @ inp[rows].float())

    def leaf(*shape, dtype=bf16):  # type: ignore[no-untyped-def]
        return torch.randn(*shape, dtype=dtype, requires_grad=True)

    kernel, silent, warned = True, False, None
    calls = [  # experts, and the types of the hidden states, the weight and the scores
        (3, bf16, bf16, fp32, kernel),
        (3, torch.float16, fp32, fp32, kernel),
        (128, bf16, bf16, fp32, kernel),
        (129, bf16, bf16, fp32, warned),
        (3, bf16, fp64, fp32, warned),
        (3, bf16, bf16, fp64, silent),
        (3, bf16, bf16, bf16, silent),
        (3, fp32, fp32, fp32, silent),
    ]
    for experts, of_inp, of_weight, of_scores, how in calls:
        for bias in (None, leaf(experts)):
            inp = leaf(5, 2, 8, dtype=of_inp)
            weight = leaf(8, experts, dtype=of_weight).detach().t().requires_grad_()
            upstream = torch.randn(5, 2, experts, dtype=of_scores)
            leaves = [each for each in (inp, weight, bias) if each is not None]
            # Up to 0.16, its name is missing where Transformer Engine is.
            with (
                mock.patch.object(moe_utils, "te_general_gemm", None, create=True),
                allowing("router_gating_backward"),
                warnings.catch_warnings(record=True) as said,
            ):
                warnings.simplefilter("always")
                scores = moe_utils.RouterGatingLinearFunction.apply(inp, weight, bias, of_scores)
                assert not launched, "the forward calls the kernel"
                with stand_ins.on_gpu(
                    "pointwise.router_gating_triton", splits=lambda tokens: 2, gradients=gradients
                ):
                    found = torch.autograd.grad(scores, leaves, upstream)
            call = (experts, of_inp, of_weight, of_scores)
            assert launched == ([fp32] if how is kernel else []), call
            assert bool(said) == (how is warned), call
            launched.clear()
            given = upstream.flatten(0, 1).double()
            exact = [
                (given @ weight.double()).view(5, 2, 8),
                given.t() @ inp.flatten(0, 1).double(),
                given.sum(0),
            ]
            for mine, wanted, own in zip(found, exact, leaves, strict=False):
                assert mine.dtype == own.dtype
                torch.testing.assert_close(mine.double(), wanted.detach(), rtol=1e-2, atol=1e-2)
