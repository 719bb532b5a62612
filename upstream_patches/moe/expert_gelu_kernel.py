"""Compute the GELU of experts and their probabilities in one kernel per direction.

What: Where the experts of `TEGroupedMLP` have a GELU without gate and bias, and routers compute in
    fp32, `bias_act_func` takes the GELU, weighted by the routers' probabilities, from
    `cppmega.ops.pointwise.weighted_gelu` on a GPU. A call that the kernel does not support ends the
    run with the reason, or, with `--allow-fallback expert_gelu_kernel`, is computed by Megatron.
Why: Megatron fuses gated activations and squared ReLU alone. A GELU in bf16 is written, multiplied
    into fp32, and cast back; of the backward pass's eight kernels, most read or write fp32. For
    65,536 rows of 896 on an H200, they take 0.403 ms forward and 0.807 backward, and these kernels
    0.099 and 0.157 (`experts_glue_h200`). torch.compile is a tenth faster than these for this one
    shape: 0.089 and 0.139. But the number of an expert rank's tokens differs in every step, so that
    torch would compile for dynamic shapes, or again; what that costs was not measured. The GELU
    in bf16, which is kept for the gradient of the probabilities, is not kept here.
Upstream: Not sent: compiling Megatron's own lines could serve upstream as well.
Remove: when upstream fuses a GELU without a gate with its probabilities.
Numerics: changes results by a rounding: stock rounds the GELU to 16 bits before it is weighted
"""

from typing import Any

from cppmega.catalogue.megatron_args import has_experts
from cppmega.edits import inserting
from cppmega.page import Edit, Patch, Source

EXPERTS = "megatron/core/transformer/moe/experts.py:TEGroupedMLP"
FORWARD = f"{EXPERTS}.forward"
METHOD = f"{EXPERTS}.bias_act_func"
IMPORTS = (
    "from cppmega.calls import served as _cppmega_served",
    "from cppmega.ops.pointwise import weighted_gelu as _cppmega_gelu",
)


def has_plain_gelu(args: Any) -> bool:
    """Whether experts have Megatron's default, a GELU without gate, and fp32 probabilities."""
    others = ("swiglu", "squared_relu", "quick_geglu", "add_bias_linear", "use_te_activation_func")
    return (
        has_experts(args)
        and bool(getattr(args, "moe_grouped_gemm", False))
        and getattr(args, "moe_router_dtype", None) == "fp32"
        and not any(getattr(args, name, False) for name in others)
    )


_GELU = inserting(
    """
    if (
        self.activation_func is F.gelu
        and bias_parallel is None
        and intermediate_parallel.is_cuda
        and permuted_probs.dtype == torch.float32
        and not self.config.gated_linear_unit
        and not self.config.bias_activation_fusion
        and _cppmega_served(
            "expert_gelu_kernel",
            _cppmega_gelu.obstacle(intermediate_parallel, permuted_probs),
            rows=intermediate_parallel,
            probs=permuted_probs,
        )
    ):
        return _cppmega_gelu.weighted_gelu(intermediate_parallel, permuted_probs)
    """,
    before="if self.config.use_te_activation_func:",
)

PATCH = Patch(
    purpose="speed",
    edits=(
        Edit(
            target=FORWARD,
            pins={
                "0.15.3": "386f491ca57758a6",
                "0.16.1": "6112b4b33116630c",
                "0.18.2": "ca02ea1751d913ee",
                "0.19.2": "ba1c530a9ab812d4",
            },
            edit=_GELU,
            imports=IMPORTS,
        ),
        Edit(
            target=METHOD,
            pins={
                "0.17.1": "31a65b373610ff06",
            },
            edit=_GELU,
            imports=IMPORTS,
        ),
    ),
    reached="forward",
    when=has_plain_gelu,
)


def fixed_upstream(source: Source) -> bool:
    return False  # no code shows whether a kernel elsewhere is faster


def verify() -> None:
    from types import SimpleNamespace

    import torch
    from megatron.core.transformer.moe import experts as moe_experts
    from torch.nn import functional

    from cppmega.ops.pointwise import weighted_gelu_naive as reference
    from cppmega.proof import stand_ins

    launched = []

    def weigh(x, weights, out):  # type: ignore[no-untyped-def]
        launched.append("forward")
        out.copy_(reference.weighted_gelu(x, weights))

    def gradients(x, weights, given, of_x, of_weights):  # type: ignore[no-untyped-def]
        launched.append("backward")
        for to, own in zip((of_x, of_weights), reference.gradients(x, weights, given), strict=True):
            to.copy_(own)

    class Layer(torch.nn.Module):
        def forward(self, x, splits):  # type: ignore[no-untyped-def]
            return x, None  # what is left is the activation

    own = moe_experts.TEGroupedMLP.__new__(moe_experts.TEGroupedMLP)
    torch.nn.Module.__init__(own)
    features = (
        *("moe_apply_probs_on_input", "gated_linear_unit", "use_te_activation_func", "fp8", "fp4"),
        *("bias_activation_fusion", "use_fused_weighted_squared_relu", "moe_paged_stash"),
        *("delay_offload_until_cuda_graph", "fine_grained_activation_offloading"),
        *("moe_router_padding_for_fp8", "moe_router_padding_for_quantization"),
    )
    own.config = SimpleNamespace(
        **dict.fromkeys(features, False),
        **dict.fromkeys(("moe_mlp_glu_interleave_size", "moe_token_dispatcher_type")),
        moe_flex_dispatcher_backend=None,
        activation_func=functional.gelu,
    )
    for name in (
        *("_with_fused_impl", "offload_expert_fc1", "offload_moe_act", "activation_recompute"),
    ):
        setattr(own, name, False)
    own.activation_func = functional.gelu
    own.linear_fc1, own.linear_fc2 = Layer(), Layer()
    splits, upstream = torch.tensor([2, 5]), torch.randn(7, 8, dtype=torch.bfloat16)
    x = torch.randn(7, 8, dtype=torch.bfloat16, requires_grad=True)
    probs = torch.rand(7, requires_grad=True)
    wide = [each.detach().double().requires_grad_() for each in (x, probs)]
    exact = functional.gelu(wide[0]) * wide[1][:, None]
    wanted = torch.autograd.grad(exact, wide, upstream.double())

    def check(kernels, dtype=torch.float32):  # type: ignore[no-untyped-def]
        out, _ = own(x, splits, probs.to(dtype))
        found = torch.autograd.grad(out, (x, probs), upstream)
        for mine, other in zip((out, *found), (exact, *wanted), strict=True):
            torch.testing.assert_close(mine.double(), other.detach(), rtol=3e-2, atol=3e-2)
        assert launched == kernels, launched
        launched.clear()

    on_gpu = stand_ins.on_gpu("pointwise.weighted_gelu_triton", weigh=weigh, gradients=gradients)
    with on_gpu:
        check(["forward", "backward"])
        check([], torch.bfloat16)  # without --moe-router-dtype fp32
        own.activation_func = lambda x: functional.gelu(x)  # somebody's own, which is called
        check([])
    own.activation_func = functional.gelu
    check([])  # on a CPU
