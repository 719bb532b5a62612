"""Compute the backward of a router's scores in one kernel.

What: With `--moe-router-dtype fp32`, `RouterGatingLinearFunction` takes its gradients on a GPU from
    `cppmega.ops.router_gating`, or from Megatron's code with a warning that gives the reason.
    Without it, nothing changes.
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


def in_fp32(args: Any) -> bool:
    """Whether the model's routers compute scores in fp32."""
    return has_experts(args) and getattr(args, "moe_router_dtype", None) == "fp32"


PATCH = Patch(
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
                asked = ctx.router_dtype == torch.float32 != inp.dtype
                if asked and _cppmega_gating.takes(inp, weight, grad_output):
                    grad_input, grad_weight = _cppmega_gating.gradients(inp, weight, grad_output)
                    grad_bias = None if bias is None else grad_output.sum(dim=0).to(bias.dtype)
                    return grad_input.view(*inp_shape), grad_weight, grad_bias, None
                """,
                after="grad_output = grad_output.view(-1, grad_shape[-1])",
            ),
            imports=("from cppmega.ops import router_gating as _cppmega_gating",),
        ),
    ),
    reached="backward",
    when=in_fp32,
)


def fixed_upstream(source: Source) -> bool:
    return False  # no code shows whether a kernel elsewhere is faster


def verify() -> None:
    from unittest import mock

    import torch
    from megatron.core.transformer.moe import moe_utils

    from cppmega.ops import router_gating, router_gating_reference
    from cppmega.proof import stand_ins

    def leaf(*shape):  # type: ignore[no-untyped-def]
        return torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)

    for bias, score in ((None, torch.float32), (leaf(3), torch.float32), (None, torch.bfloat16)):
        inp, weight, upstream = leaf(5, 2, 8), leaf(3, 8), torch.randn(5, 2, 3).to(score)
        leaves = [each for each in (inp, weight, bias) if each is not None]
        with (  # up to 0.16, its name is missing where Transformer Engine is
            mock.patch.object(moe_utils, "te_general_gemm", None, create=True),
            stand_ins.by_reference(
                router_gating, "gradients", router_gating_reference.gradients
            ) as kernel,
        ):
            scores = moe_utils.RouterGatingLinearFunction.apply(inp, weight, bias, score)
            found = torch.autograd.grad(scores, leaves, upstream)
        asked = score == torch.float32
        assert kernel.call_count == asked, (
            f"the kernel is called for scores in {score}: {not asked}"
        )
        given = upstream.flatten(0, 1).double()
        exact = [
            (given @ weight.double()).view(5, 2, 8),
            given.t() @ inp.flatten(0, 1).double(),
            given.sum(0),
        ]
        for mine, wanted, own in zip(found, exact, leaves, strict=False):
            assert mine.dtype == own.dtype
            torch.testing.assert_close(mine.double(), wanted.detach(), rtol=1e-2, atol=1e-2)
