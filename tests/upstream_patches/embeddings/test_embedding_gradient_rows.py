"""A model with MTP under Megatron's DDP has the gradients that the lookups of stock give."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from cppmega.catalogue import loader as catalogue
from tests.upstream_patches import one_process

torch = pytest.importorskip("torch")

PAGE = "embedding_gradient_rows"


@pytest.mark.megatron
@pytest.mark.parametrize("version", one_process.PAGES[PAGE])
def test_gradients(version: str) -> None:
    one_process.assert_passes(PAGE, version)


def check(stock: one_process.Stock) -> None:
    from cppmega.runtime import embedding_gradient_rows as page

    for tied, overlaps, of_total in itertools.product(
        (False, True), (False, True), (torch.float32, torch.bfloat16)
    ):
        launched: list[int] = []
        with mock.patch.object(page, "lookup", lambda *given: None):
            plain = trained(tied, overlaps, of_total, launched, zeros=True)
        assert not launched
        found = trained(tied, overlaps, of_total, launched)
        assert len(launched) == 6, "three lookups in each of two micro-batches"
        torch.testing.assert_close(found[0], plain[0], rtol=0, atol=0)
        assert set(found[1]) == set(plain[1])
        tolerance = 1e-5 if of_total == torch.float32 else 2e-2
        for name, total in found[1].items():
            torch.testing.assert_close(total, plain[1][name], rtol=tolerance, atol=tolerance)


def trained(
    tied: bool, overlaps: bool, of_total: torch.dtype, launched: list[int], zeros: bool = False
) -> Any:
    """The losses of two micro-batches and every `main_grad`, by lookups on what counts as a GPU.

    Args:
        tied: whether the output layer has the weight of the embedding.
        overlaps: whether DDP asks for a gradient of each parameter, to reduce it at once.
        of_total: the type of `main_grad`, and if it is not fp32, that of the parameters.
        launched: the launches of the kernel are appended.
        zeros: ask for placeholders of zeros with and without tied embeddings, as stock does.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.tensor_parallel import layers

    from cppmega.proof import small_models

    def product(x: Any, gradient: Any, total: Any) -> None:
        total.add_((gradient.double().t() @ x.double()).to(total.dtype))

    def add(rows: Any, order: Any, gradient: Any, total: Any) -> None:
        launched.append(len(rows))
        total.index_add_(0, rows.long() - 1, gradient[order].to(total.dtype))

    apex = SimpleNamespace(wgrad_gemm_accum_fp32=product, wgrad_gemm_accum_fp16=product)
    options: dict[str, Any] = {"gradient_accumulation_fusion": True, "params_dtype": of_total}
    options["mtp_loss_scaling_factor"] = 0.1  # the default since 0.16
    if of_total == torch.bfloat16:
        options["bf16"] = True
    with (
        mock.patch.object(layers, "_grad_accum_fusion_available", True),
        mock.patch.object(layers, "fused_weight_gradient_mlp_cuda", apex, create=True),
    ):
        model = small_models.gpt(mtp=2, tied=tied, **options).to(of_total)
        weight = model.embedding.word_embeddings.weight
        if zeros:
            weight.zero_out_wgrad = True
        config = DistributedDataParallelConfig(
            overlap_grad_reduce=overlaps, grad_reduce_in_fp32=of_total == torch.float32
        )
        ddp = DistributedDataParallel(model.config, config, model)
        ddp.zero_grad_buffer()
        losses = []
        for _ in range(2):  # micro-batches
            given = small_models.arguments(model)
            with lookups_on_gpu(add):
                loss = ddp(**given).float().sum()
                loss.backward()
            losses.append(loss.detach())
            assert weight.grad is None, "DDP's hook has not seen the placeholder"
        if overlaps:
            ddp.finish_grad_sync()
    totals = {name: each.main_grad.float().clone() for name, each in model.named_parameters()}
    return torch.stack(losses), totals


@contextlib.contextmanager
def lookups_on_gpu(add: Any) -> Iterator[None]:
    """Let the embedding's weight, and nothing else, count as a tensor of a GPU."""
    from cppmega.ops.pointwise import embedding
    from cppmega.proof import stand_ins
    from cppmega.runtime import embedding_gradient_rows as page

    real = page.lookup

    def lookup(*given: Any) -> Any:
        with mock.patch.object(torch.Tensor, "is_cuda", True):
            return real(*given)

    with (
        stand_ins.on_gpu("pointwise.embedding_triton", add=add),
        mock.patch.object(torch.Tensor, "is_cuda", False),
        mock.patch.object(embedding, "has_triton", lambda: True),
        mock.patch.object(page, "lookup", lookup),
    ):
        yield


def test_which_runs_must_reach_it() -> None:
    when = catalogue.load()[PAGE].patch.when
    assert when is not None
    assert when(SimpleNamespace(gradient_accumulation_fusion=True))
    assert not when(SimpleNamespace(gradient_accumulation_fusion=False))
    assert not when(SimpleNamespace())
