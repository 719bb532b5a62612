"""Proofs of the linear cross-entropy pages: the loss of a head, without its logits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import MethodType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cppmega.proof import cpu_shims, small_models
from cppmega.proof.small_models import B, H, S, V, arguments, batch

LINEAR = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"}


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The largest tensor with rows as long as the vocabulary that any operation returned."""

    def __init__(self, columns: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.columns, self.elements = columns, 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[-1] == self.columns:
                self.elements = max(self.elements, leaf.numel())
        return out


@contextlib.contextmanager
def no_logits(columns: int = V) -> Iterator[None]:
    """Fail if the logits of all `S * B` tokens were computed; the op uses small chunks.

    Args:
        columns: vocabulary size of this rank.

    Raises:
        AssertionError: all logits were computed at once.
    """
    from cppmega.ops import linear_cross_entropy as op

    with mock.patch.object(op, "default_chunk_tokens", lambda *_: 4), _Largest(columns) as seen:
        yield
    whole = S * B * columns
    assert 0 < seen.elements < whole, f"{seen.elements} of {whole} logits at once"


def gpt(**options: Any) -> Any:
    """A GPTModel configured for linear cross-entropy."""
    return small_models.gpt(**(LINEAR | options))


def hybrid(**options: Any) -> Any:
    """A hybrid model configured for linear cross-entropy."""
    return small_models.hybrid(**(LINEAR | options))


def head(model: Any) -> None:
    """Assert that a model computes the cross-entropy of its logits without the logits."""
    given = arguments(model)
    with no_logits():
        loss = model(**given)
    logits = model(**arguments(model, labels=None))
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), given["labels"].flatten(), reduction="none"
    )
    torch.testing.assert_close(loss, expected.view(B, S))
    assert loss.requires_grad


def mtp() -> None:
    """Assert that the MTP loss needs no logits, and has the gradient of the masked mean."""
    cpu_shims.init_distributed()
    from megatron.core.transformer import multi_token_prediction as module

    from cppmega.features.linear_cross_entropy.module import LinearCrossEntropyModule

    settings = small_models.config(mtp_num_layers=1, mtp_loss_scaling_factor=0.5, **LINEAR)
    layer = LinearCrossEntropyModule(
        H, V, config=settings, init_method=torch.nn.init.normal_, bias=False
    )
    given = batch()
    hidden = torch.randn(2 * S, B, H, generator=torch.Generator().manual_seed(2))
    hidden.requires_grad_()
    loss_of = _in_a_function if hasattr(module, "process_mtp_loss") else _inline
    with no_logits():
        out = loss_of(settings, layer, hidden, given["labels"], given["loss_mask"])
        (gradient,) = torch.autograd.grad(out.sum(), hidden)
    labels, mask = given["labels"].roll(-1, 1), given["loss_mask"].roll(-1, 1)
    mask[:, -1] = 0
    logits = (hidden[S:] @ layer.weight.t()).transpose(0, 1)
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none"
    ).view(B, S)
    (expected,) = torch.autograd.grad(0.5 * (losses * mask).sum() / mask.sum(), hidden)
    torch.testing.assert_close(gradient[S:], expected[S:])


def _in_a_function(settings: Any, layer: Any, hidden: Any, labels: Any, mask: Any) -> Any:
    """Return the hidden states that carry the MTP loss into the backward pass, since 0.17."""
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.transformer import multi_token_prediction as module

    model = SimpleNamespace(config=settings)
    return module.process_mtp_loss(
        hidden_states=hidden,
        labels=labels,
        loss_mask=mask,
        output_layer=layer,
        output_weight=None,
        runtime_gather_output=None,
        is_training=True,
        compute_language_model_loss=MethodType(LanguageModule.compute_language_model_loss, model),
        config=settings,
    )


def _inline(settings: Any, layer: Any, hidden: Any, labels: Any, mask: Any) -> Any:
    """Return the scaled MTP loss of 0.16, from the loop in `GPTModel` before the main head."""
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.models.gpt import gpt_model

    class Seen(Exception):  # noqa: N818
        """Raised when the only depth of the loop has been processed."""

    def stop(_: Any, loss: Any) -> None:
        raise Seen(loss)

    model = SimpleNamespace(
        config=settings,
        training=False,
        post_process=True,
        share_embeddings_and_output_weights=False,
        embedding=None,
        mtp=lambda **_: hidden,
        output_layer=layer,
        cp_group=None,
    )
    model.compute_language_model_loss = MethodType(
        LanguageModule.compute_language_model_loss, model
    )
    post: Any = gpt_model.GPTModel._postprocess
    others = dict.fromkeys(("hidden_states", "input_ids", "position_ids", "rotary_pos_emb"))
    others |= dict.fromkeys(("rotary_pos_cos", "rotary_pos_sin"))
    try:
        with mock.patch.object(gpt_model, "MTPLossAutoScaler", SimpleNamespace(apply=stop)):
            post(model, labels=labels, loss_mask=mask, mtp_in_postprocess=True, **others)
    except Seen as seen:
        return seen.args[0]
    raise AssertionError("no MTP loss was computed")
