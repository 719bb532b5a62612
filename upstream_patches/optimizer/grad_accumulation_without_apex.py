"""Fuse the accumulation of weight gradients without apex.

What: `ColumnParallelLinear` is built with `--gradient-accumulation-fusion`, Megatron's default,
    where apex is not installed. Its backward pass then adds the gradient of the weight to the fp32
    `main_grad` by `cppmega.ops.common.weight_gradient`, one product of cuBLAS; where apex is
    installed, its kernel is still used. Layers of Transformer Engine have such a product of their
    own. Where MTP depths look up the same weight in the last pipeline stage, their gradient is
    added, too.
Why: Every model has at least one `ColumnParallelLinear`, its output layer, whose constructor fails
    with "the custom CUDA extension fused_weight_gradient_mlp_cuda module is not found". apex has no
    wheels, so runs turn the fusion off, for the layers of Transformer Engine, too: the gradient of
    every weight is written in bf16, read again and added to fp32 by a kernel of its own, in every
    micro-batch (1,142 kernels per step of NAM56R on two H200; tested that stock fails on 0.15.3 to
    0.19.2). With apex, stock loses the gradient of the lookup of MTP depths if embeddings are tied
    and there are several pipeline stages: its norm was 2.5433 and not 2.5476 (computed on CPU).
Upstream: Not sent: upstream installs apex in its containers.
Remove: when the constructor no longer requires apex.
Numerics: changes results of runs that had turned the fusion off: gradients are no longer rounded to
    bf16 before they are added; other runs used to fail
"""

from typing import Any

from cppmega.catalogue.megatron_args import fuses_accumulation
from cppmega.edits import in_order, inserting, replacing
from cppmega.page import Edit, Patch, Source

LAYERS = "megatron/core/tensor_parallel/layers.py"
BUILT = f"{LAYERS}:ColumnParallelLinear.__init__"
BACKWARD = f"{LAYERS}:LinearWithGradAccumulationAndAsyncCommunication.backward"
TIED = (
    "megatron/core/models/common/language_module/language_module.py:"
    "LanguageModule.setup_embeddings_and_output_layer"
)
STOCK = "config.gradient_accumulation_fusion and not _grad_accum_fusion_available"


def _kernel(name: str) -> Any:
    return replacing(
        f"fused_weight_gradient_mlp_cuda.{name}",
        f"(fused_weight_gradient_mlp_cuda.{name} if _grad_accum_fusion_available "
        "else _cppmega_products.add_weight_gradient)",
    )


PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=BUILT,
            pins={
                "0.15.3": "7bde110a9a9b2f29",
                "0.16.1": "7101f3ab5a9fd378",
                "0.17.1": "7101f3ab5a9fd378",
                "0.18.2": "21a21ca212f5e008",
                "0.19.2": "734b481025ac9ac8",
                "main-d98e8a64": "e1e780b33ddd8c57",
            },
            edit=replacing(STOCK, "False"),
        ),
        Edit(
            target=BACKWARD,
            pins={
                "0.15.3": "67c06262553667ed",
                "0.16.1": "67c06262553667ed",
                "0.17.1": "67c06262553667ed",
                "0.18.2": "b9514ca3cd5f781c",
                "0.19.2": "4f4b9acc2b799a24",
                "main-d98e8a64": "fb19c21a881f5d73",
            },
            edit=in_order(_kernel("wgrad_gemm_accum_fp32"), _kernel("wgrad_gemm_accum_fp16")),
            imports=("from cppmega.ops.common import weight_gradient as _cppmega_products",),
            mark="",
        ),
        Edit(
            target=TIED,
            pins={
                "0.15.3": "49fb0d8ac29803a3",
                "0.16.1": "2d16b0c7ae03115e",
                "0.17.1": "d65d3e084e87fd7f",
                "0.18.2": "caac0f9558258b4d",
                "0.19.2": "caac0f9558258b4d",
                "main-d98e8a64": "caac0f9558258b4d",
            },
            # The output layer adds its gradient to `main_grad`. Without this, DDP takes that of the
            # MTP depths' lookup for the placeholder which autograd is given in its place.
            edit=inserting(
                """
                if self.share_embeddings_and_output_weights and getattr(self, "mtp_process", False):
                    weight.zero_out_wgrad = True
                """,
                after="weight.shared = True",
            ),
            mark="",
        ),
    ),
    reached="startup",
    when=fuses_accumulation,
    asked_by=("--no-gradient-accumulation-fusion",),
    wanted_by=lambda recipe: recipe.gradient_accumulation_fusion,
)


def fixed_upstream(source: Source) -> bool:
    text = source.text(BUILT)
    return bool(text) and "_grad_accum_fusion_available" not in text


def verify() -> None:
    from unittest import mock

    import torch
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer.transformer_config import TransformerConfig

    from cppmega.ops.common import weight_gradient
    from cppmega.proof import cpu_shims

    cpu_shims.init_distributed()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=True,
    )
    bf16, fp32 = torch.bfloat16, torch.float32
    products = []

    def addmm(total, a, b, out, out_dtype=None):  # type: ignore[no-untyped-def]
        products.append(out_dtype)
        out.copy_(total.double() + a.double() @ b.double())

    def apex(x, gradient, total):  # type: ignore[no-untyped-def]
        products.append("apex")
        total.add_((gradient.double().t() @ x.double()).to(total.dtype))

    kernels = mock.Mock(wgrad_gemm_accum_fp32=apex, wgrad_gemm_accum_fp16=apex)

    def check(of_x, of_total, has_apex, on_gpu, wanted):  # type: ignore[no-untyped-def]
        products.clear()
        with (
            mock.patch.object(layers, "_grad_accum_fusion_available", has_apex),
            mock.patch.object(layers, "fused_weight_gradient_mlp_cuda", kernels, create=True),
        ):
            layer = layers.ColumnParallelLinear(
                8, 6, config=config, init_method=torch.nn.init.normal_, bias=False
            ).to(of_x)
            total = layer.weight.main_grad = torch.ones(6, 8, dtype=of_total)
            exact = torch.ones(6, 8, dtype=torch.float64)
            for _ in range(2):  # micro-batches
                x, upstream = torch.randn(5, 2, 8, dtype=of_x), torch.randn(5, 2, 6, dtype=of_x)
                out = layer(x)[0]
                with (
                    mock.patch.object(weight_gradient, "MIXED", True),
                    mock.patch.object(torch, "addmm", addmm if on_gpu else torch.addmm),
                    mock.patch.object(torch.Tensor, "is_cuda", on_gpu),
                ):
                    out.backward(upstream)
                exact += upstream.flatten(0, 1).double().t() @ x.flatten(0, 1).double()
        rtol = 1e-5 if of_total is fp32 else 2e-2
        torch.testing.assert_close(total.double(), exact, rtol=rtol, atol=10 * rtol)
        assert products == wanted * 2, (of_x, of_total, has_apex, on_gpu, products)

    check(fp32, fp32, False, False, [])
    check(bf16, fp32, False, False, [])
    check(bf16, bf16, False, False, [])
    check(bf16, fp32, False, True, [fp32])
    check(bf16, bf16, False, True, [None])
    check(bf16, fp32, True, False, ["apex"])
    check(bf16, bf16, True, False, ["apex"])
