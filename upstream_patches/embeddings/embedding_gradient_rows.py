"""Add the gradient of an embedding to `main_grad` for the rows that were looked up only.

What: With gradient accumulation fusion, the lookup of `VocabParallelEmbedding` on a GPU adds the
    gradients of its rows directly to the parameter's `main_grad`, by
    `cppmega.ops.pointwise.embedding`: summed per row in fp32, in a fixed order, also without
    `--deterministic-mode`. Autograd and DDP's hook are given a placeholder, as by Megatron's linear
    layers, once per backward pass. Only weights that the output layer shares still ask for
    placeholders of zeros, which DDP adds; stock does so for all embeddings of models with MTP.
    Lookups on a CPU, without DDP's `main_grad`, with Megatron-FSDP, with weights that are gathered
    for each use (GTP), and while PyTorch traces are Megatron's. Another call that the kernel does
    not support ends the run with the reason, or, with `--allow-fallback embedding_gradient_rows`,
    is computed by Megatron's code.
Why: PyTorch writes a gradient of the whole table, almost all of which is zero, autograd adds those
    of the trunk and of every MTP depth, and DDP adds the sum to `main_grad`, in every micro-batch.
    For a table of 129,280 rows of 7,168, which a trunk and an MTP depth look up for 8,192 tokens,
    that takes 7.06 ms on an H200, and this 0.87 (`embedding_rows_h200`).
Upstream: Not sent: the kernel is one of `cppmega.ops`.
Remove: when upstream adds the gradients of rows to `main_grad`.
Numerics: changes results by a rounding: the gradient of a row is added in fp32, and is no longer
    rounded to bf16 first
"""

from typing import Any

from cppmega.catalogue.megatron_args import fuses_accumulation
from cppmega.edits import in_order, inserting, replacing
from cppmega.page import Edit, Patch, Source

LAYERS = "megatron/core/tensor_parallel/layers.py"
BUILT = f"{LAYERS}:VocabParallelEmbedding.__init__"
LOOKUP = f"{LAYERS}:VocabParallelEmbedding.forward"
SHARED = (
    "megatron/core/models/common/language_module/language_module.py:"
    "LanguageModule.setup_embeddings_and_output_layer"
)
IMPORTS = ("from cppmega.runtime import embedding_gradient_rows as _cppmega_embedding",)


def _of(weight: str) -> Any:
    """The lookup by the page's function; where that gives None, Megatron's."""
    return in_order(
        inserting(
            f"""
            rows = _cppmega_embedding.lookup(
                self, {weight}, masked_input, input_mask if self.tp_group.size() > 1 else None
            )
            """,
            before="if self.deterministic_mode:",
        ),
        replacing(f"{weight}[masked_input]", f"{weight}[masked_input] if rows is None else rows"),
        replacing(
            f"F.embedding(masked_input, {weight})",
            f"F.embedding(masked_input, {weight}) if rows is None else rows",
        ),
    )


PATCH = Patch(
    purpose="speed",
    edits=(
        Edit(
            target=BUILT,
            pins={
                "0.15.3": "f3788be326061d36",
                "0.16.1": "f3788be326061d36",
                "0.17.1": "f3788be326061d36",
            },
            edit=inserting(
                "self.config = config", after="self.deterministic_mode = config.deterministic_mode"
            ),
            mark="",
        ),
        Edit(
            target=LOOKUP,
            pins={
                "0.15.3": "978c70d62292642c",
                "0.16.1": "978c70d62292642c",
                "0.17.1": "978c70d62292642c",
                "0.18.2": "10ea4a9f304d8f53",
            },
            edit=_of("self.weight"),
            imports=IMPORTS,
        ),
        Edit(
            target=LOOKUP,
            pins={"0.19.2": "f4c0b0ce14d1b852"},
            edit=_of("weight"),
            imports=IMPORTS,
        ),
        Edit(
            target=SHARED,
            pins={
                "0.15.3": "49fb0d8ac29803a3",
                "0.16.1": "2d16b0c7ae03115e",
                "0.17.1": "d65d3e084e87fd7f",
                "0.18.2": "caac0f9558258b4d",
                "0.19.2": "caac0f9558258b4d",
            },
            # Without a shared output layer, DDP would add placeholders of zeros to the whole table.
            edit=replacing(
                "self.shared_embedding_or_output_weight().zero_out_wgrad = True",
                """
                self.shared_embedding_or_output_weight().zero_out_wgrad = (
                    self.share_embeddings_and_output_weights
                )
                """,
            ),
            mark="",
        ),
    ),
    reached="forward",
    when=fuses_accumulation,
    after=("grad_accumulation_without_apex", "input_embeddings"),
)


def fixed_upstream(source: Source) -> bool:
    return "main_grad" in source.text(LOOKUP)


def verify() -> None:
    import warnings
    from types import SimpleNamespace
    from unittest import mock

    import torch
    from megatron.core.tensor_parallel import layers

    from cppmega.calls import allowing
    from cppmega.proof import cpu_shims, small_models, stand_ins

    cpu_shims.init_distributed()
    fp32, launched = torch.float32, []

    def add(rows, order, gradient, total):  # type: ignore[no-untyped-def]
        assert rows.dtype == torch.int32 and rows.equal(rows.sort()[0])
        assert gradient.is_contiguous() and total.is_contiguous()
        launched.append((rows == 0).sum().item())
        wide = torch.zeros(len(total) + 1, total.size(1)).double()
        wide.index_add_(0, rows.long(), gradient[order].double())
        total.add_(wide[1:].to(total.dtype))

    def made(of_total=fp32, dtype=torch.bfloat16, fuses=True, **settings):  # type: ignore[no-untyped-def]
        config = small_models.config(params_dtype=dtype)
        config.gradient_accumulation_fusion = fuses
        config.deterministic_mode = settings.get("deterministic", False)
        layer = layers.VocabParallelEmbedding(
            12, 8, init_method=torch.nn.init.normal_, config=config
        )
        if of_total is not None:
            layer.weight.main_grad = torch.ones(12, 8, dtype=of_total)
            layer.weight.grad_added_to_main_grad = False
        layer.weight.zero_out_wgrad = settings.get("zeros", False)
        return layer

    ids = torch.tensor([[3, 3, 11, 0, 3], [5, 3, 0, 3, 7]])
    upstream = torch.randn(2, 2, 5, 8, dtype=torch.bfloat16)
    exact = torch.ones(12, 8).double()
    for part in upstream:
        exact.index_add_(0, ids.flatten(), part.flatten(0, 1).double())

    def trained(layer):  # type: ignore[no-untyped-def]
        """Two lookups, whose gradients arrive in one backward pass, in both layouts."""
        launched.clear()
        with stand_ins.on_gpu("pointwise.embedding_triton", add=add):
            outs = [layer(ids), layer(ids).transpose(0, 1).contiguous()]
            kind = layer.weight.dtype
            given = [upstream[0].to(kind), upstream[1].transpose(0, 1).contiguous().to(kind)]
            torch.autograd.backward(outs, given)
        assert outs[0].equal(layer.weight[ids]) and outs[1].equal(layer.weight[ids.t()])
        return layer.weight

    for settings in (
        {},
        {"of_total": torch.bfloat16},
        {"dtype": fp32},
        {"deterministic": True},
        {"zeros": True},
    ):
        weight = trained(made(**settings))
        assert launched == [0, 0], f"the gradient of the whole table is written: {settings}"
        assert weight.grad_added_to_main_grad and weight.grad is not None
        assert not settings.get("zeros") or not weight.grad.any()
        atol = 1e-5 if weight.main_grad.dtype == fp32 else 5e-2
        torch.testing.assert_close(weight.main_grad.double(), exact, rtol=atol, atol=atol)

    fsdp, gathered = made(), made()
    fsdp.weight.__fsdp_param__ = True
    gathered.weight.main_grad = torch.ones(8, 12).t()
    for other in (made(fuses=False), made(of_total=None), fsdp, gathered, made(dtype=torch.double)):
        with warnings.catch_warnings(action="ignore"), allowing("embedding_gradient_rows"):
            weight = trained(other)
        assert not launched and not getattr(weight, "grad_added_to_main_grad", False)
        torch.testing.assert_close(1 + weight.grad.double(), exact, rtol=5e-2, atol=5e-2)
    frozen = made()
    frozen.weight.requires_grad_(False)
    with stand_ins.on_gpu("pointwise.embedding_triton", add=add):
        assert not frozen(ids).requires_grad
        with mock.patch.object(torch.compiler, "is_compiling", lambda: True):
            made()(ids).sum().backward()
        with torch.no_grad():
            made()(ids)
    made()(ids).sum().backward()  # on a CPU
    assert not launched

    # Of two tensor-parallel ranks, this one has tokens 0 to 11; it reads row 0 for the others.
    split = made()
    split.tp_group = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    with (
        stand_ins.on_gpu("pointwise.embedding_triton", add=add),
        mock.patch.object(
            layers, "reduce_from_tensor_model_parallel_region", lambda out, **of: out
        ),
    ):
        out = split(torch.tensor([[3, 12, 20, 3], [0, 15, 23, 7]]))
        assert not out[:, 1:3].any()
        out.backward(torch.ones_like(out))
    assert launched == [4], "tokens of other ranks are summed"
    wanted = torch.ones(12) + torch.tensor([3, 3, 0, 7]).bincount(minlength=12)
    assert split.weight.main_grad.equal(wanted[:, None].expand(12, 8))

    for tied in (False, True):
        weight = small_models.gpt(mtp=1, tied=tied).embedding.word_embeddings.weight
        assert bool(getattr(weight, "zero_out_wgrad", False)) is tied, (
            "DDP adds zeros to the whole table"
        )
