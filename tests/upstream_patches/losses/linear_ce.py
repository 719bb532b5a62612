"""The process of the linear cross-entropy tests: real models, on stock and on patched code."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from cppmega import calls
from cppmega.catalogue import loader as catalogue
from cppmega.errors import CppmegaError
from cppmega.ops import linear_cross_entropy as op
from cppmega.proof import cpu_shims
from cppmega.proof.cpu_shims import keep_saves_here

HEADS = ("linear_ce_gpt_head", "linear_ce_hybrid_head")
OFF = {"cross_entropy_loss_fusion": False, "cross_entropy_fusion_impl": "native"}
proof: Any = importlib.import_module(
    f"{catalogue.package_of(catalogue.builtin_folder() / 'losses')}._linear_ce.proof"
)
B, S, V = proof.B, proof.S, proof.V
GPT, HYBRID = proof.gpt, proof.hybrid
SOME, NONE_LEFT, NOT_GIVEN = "some tokens masked", "all tokens masked", "no mask"


def split(make: Any) -> Any:
    """Build with torch's norms under sequence parallelism, which Megatron's wrapper rejects."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def norm(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        return torch.nn.LayerNorm(hidden_size, eps=eps)

    def built(**options: Any) -> Any:
        with mock.patch.object(WrappedTorchNorm, "__new__", staticmethod(norm)):
            return make(**options)

    return built


def cases(version: str, ranks: int) -> dict[str, tuple[Any, dict[str, Any], str]]:
    """Return the cases: name -> model, its options, mask."""
    new = version >= "0.17"
    found: dict[str, tuple[Any, dict[str, Any], str]] = {
        "gpt, mtp": (GPT, {"mtp": 2}, SOME),
        "gpt, mtp, no mask": (GPT, {"mtp": 2}, NOT_GIVEN),
        "gpt, tied, mtp, per token": (
            GPT,
            {"mtp": 2, "tied": True, "calculate_per_token_loss": True},
            SOME,
        ),
        "hybrid": (HYBRID, {}, SOME),
        "hybrid, tied, no mask": (HYBRID, {"tied": True}, NOT_GIVEN),
        # 0.16 divides the loss of MTP by the count of its tokens.
        "all masked": (GPT, {"mtp": 2 if new else None}, NONE_LEFT),
    }
    if new:
        mup = {"use_mup": True, "mup_base_hidden_size": 4}
        found["gpt, mtp, mup"] = (GPT, {"mtp": 1, **mup}, SOME)
    if version >= "0.19":
        found["gpt, mtp, detached heads"] = (GPT, {"mtp": 1, "mtp_detach_heads": True}, SOME)
    if ranks > 1:
        parallel = {"sequence_parallel": True}
        found["gpt, mtp, sequence parallel"] = (split(GPT), {"mtp": 2, **parallel}, SOME)
        found["hybrid, sequence parallel"] = (split(HYBRID), parallel, SOME)
        found = {
            name: (make, {**options, "tensor_model_parallel_size": ranks}, mask)
            for name, (make, options, mask) in found.items()
        }
    return found


@contextlib.contextmanager
def mtp_log() -> Iterator[list[Any]]:
    """Return what MTP logs per depth: the loss, and on 0.19 the accepted tokens and all tokens."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper as Helper

    logged: list[Any] = []
    name = "save_metrics_to_tracker"
    if not hasattr(Helper, name):
        name = "save_loss_to_tracker"

    def save(*arguments: Any, **_: Any) -> None:
        logged.extend(a.detach().clone() for a in arguments if isinstance(a, torch.Tensor))

    with mock.patch.object(Helper, name, save):
        yield logged


def outcome(model: Any, mask: str) -> dict[str, Any]:
    """Return loss per token, MTP's log, and all gradients of Megatron's reduced loss."""
    weights = proof.batch()["loss_mask"]
    if mask == NONE_LEFT:
        weights = torch.zeros(B, S)
    if mask == NOT_GIVEN:
        # The loss function may then weigh tokens as it likes.
        weights = torch.linspace(-1, 2, B * S).view(B, S)
    given = None if mask == NOT_GIVEN else weights
    with mtp_log() as logged:
        loss = model(**proof.arguments(model, loss_mask=given))
    ((loss * weights).sum() / weights.sum().clamp(min=1) * 64).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), "logged": logged, "gradients": gradients}


def main(side: str, version: str, ranks: int, folder: Path) -> None:
    """Run every case on one tree; the patched side compares with what the stock side wrote."""
    cpu_shims.init_distributed(tensor=ranks)
    rank = torch.distributed.get_rank()
    kept = folder / f"stock-{rank}.pt"
    if side == "stock":
        results = {}
        for name, (make, options, mask) in cases(version, ranks).items():
            model = make(**options, **OFF)
            results[name] = outcome(model, mask)
            results[name]["keys"] = list(model.state_dict())
        torch.save(results, kept)
        if ranks == 1:
            save_checkpoint(GPT(mtp=2, **OFF), folder / "checkpoint")
        return
    expected = torch.load(kept)
    for name, (make, options, mask) in cases(version, ranks).items():
        check_off(name, make(**options, **OFF), mask, expected[name])
    assert "cppmega.features.linear_cross_entropy.module" not in sys.modules, "only with the flag"
    for name, (make, options, mask) in cases(version, ranks).items():
        check_on(name, make(**options), mask, expected[name], V // ranks)
    check_other_paths(ranks)
    check_broken_promise(ranks)
    check_another_weighting(ranks)
    check_fourth_product_is_logged(ranks)
    check_masked_tokens_left_out(ranks)
    if version >= "0.19":
        check_distillation(ranks)
    check_logged_logits(ranks)
    if version >= "0.17":
        check_mtp_without_labels(ranks)
    if ranks == 1:
        check_checkpoint(folder / "checkpoint")


def check_off(name: str, model: Any, mask: str, expected: dict[str, Any]) -> None:
    """Without the flag, the patched code is bitwise equal to stock."""
    torch.testing.assert_close(
        {k: v for k, v in expected.items() if k != "keys"},
        outcome(model, mask),
        rtol=0,
        atol=0,
        equal_nan=True,
        msg=lambda said: f"{name}, flag off: {said}",
    )


def check_on(name: str, model: Any, mask: str, expected: dict[str, Any], columns: int) -> None:
    """With the flag there are no logits, and the values are those of stock."""
    assert list(model.state_dict()) == expected["keys"]
    with proof.no_logits(columns):
        got = outcome(model, mask)
    torch.testing.assert_close(
        got,
        {k: v for k, v in expected.items() if k != "keys"},
        rtol=2e-5,
        atol=2e-6,
        msg=lambda said: f"{name}: {said}",
    )


def check_other_paths(ranks: int) -> None:
    """Where that is allowed, unsupported calls use Megatron's path, with the same numbers."""
    from cppmega.features.linear_cross_entropy import heads

    parallel = {"tensor_model_parallel_size": ranks}
    for make in (GPT, HYBRID):
        model, plain = make(**parallel), make(**parallel, **OFF)
        given = proof.arguments(model)
        no_labels = {**given, "labels": None}
        if make is GPT:
            with torch.no_grad():
                assert torch.equal(model.eval()(**no_labels), plain.eval()(**no_labels))
        expected = plain(**given)
        # Distillation puts a loss of its own in the place of Megatron's, and wants logits.
        seen = []
        model.compute_language_model_loss = lambda labels, logits, seen=seen: (
            seen.append(logits.shape) or logits.sum(-1)
        )
        with pytest.raises(calls.CallDeclinedError, match="the model has its own loss"):
            model(**given)
        with calls.allowing(*HEADS), pytest.warns(UserWarning, match="has its own loss"):
            model(**given)
        assert seen == [(S, B, V // ranks)]
        del model.compute_language_model_loss
        no_kernel = mock.patch.object(
            heads, "select_backend", lambda *_: ("reference", "no triton")
        )
        with no_kernel, mock.patch.object(torch.Tensor, "is_cuda", True):
            own = model.output_layer, None, None, model.compute_language_model_loss, None
            with pytest.raises(calls.CallDeclinedError, match="no triton"):
                heads.find_head(*own, HEADS[0])
        # What a layer says that it cannot do keeps Megatron's path, which says so.
        model.output_layer.loss_obstacle = lambda *_: "of a test"
        with calls.allowing(*HEADS), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            loss = model(**given)
        assert torch.equal(loss, expected)
        assert any("without fusion" in str(warning.message) for warning in said)


def check_broken_promise(ranks: int) -> None:
    """If a loss function weights tokens by more than its mask, the error names the patch."""
    model = GPT(tensor_model_parallel_size=ranks)
    loss = model(**proof.arguments(model))
    with pytest.raises(RuntimeError, match="linear_ce_gpt_head"):
        (loss * torch.linspace(1, 2, B * S).view(B, S)).sum().backward()


def check_another_weighting(ranks: int) -> None:
    """With the variable for other weightings, the numbers are those of stock."""
    weights = torch.linspace(1, 2, B * S).view(B, S)
    found = []
    for flag in (OFF, {}):
        model = GPT(mtp=2, tensor_model_parallel_size=ranks, **flag)
        variable = {"CPPMEGA_LINEAR_CE_UPSTREAM": "arbitrary"}
        with mock.patch.dict(os.environ, variable), spoken() as said:
            loss = model(**proof.arguments(model))
            (loss * weights).sum().backward()
        found.append([p.grad for p in model.parameters()])
        heard = any("CPPMEGA_LINEAR_CE_UPSTREAM=arbitrary" in message for message in said)
        assert heard == (flag == {} and torch.distributed.get_rank() == ranks - 1), said
    torch.testing.assert_close(*found, rtol=2e-5, atol=2e-6)
    with (
        mock.patch.dict(os.environ, {"CPPMEGA_LINEAR_CE_UPSTREAM": "arbitary"}),
        pytest.raises(CppmegaError, match="linear-ce-upstream-unknown"),
    ):
        model(**proof.arguments(model))


def check_fourth_product_is_logged(ranks: int) -> None:
    """Without a mask a fourth product is needed; the last rank, which has the head, logs it."""
    model = GPT(tensor_model_parallel_size=ranks)
    with spoken() as said:
        model(**proof.arguments(model, loss_mask=None))
    last = torch.distributed.get_rank() == ranks - 1
    assert any("a fourth GEMM): forward() got no loss_mask" in each for each in said) == last


def check_masked_tokens_left_out(ranks: int) -> None:
    """With a counted mask, the same gradients come from the rows that count."""
    found = []
    for count in (False, True):
        model = GPT(mtp=2, tensor_model_parallel_size=ranks)
        mask = proof.batch()["loss_mask"]
        if count:
            op.counting_tokens(mask, int(mask.count_nonzero()))
        with mock.patch.object(op, "_ROW_TILE", 1), mtp_log() as logged:
            loss = model(**proof.arguments(model, loss_mask=mask))
            (loss * mask).sum().backward()
        if count:
            assert not loss[mask == 0].any()
        found.append([loss * mask, *logged, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*found, rtol=2e-5, atol=2e-6)


def check_distillation(ranks: int) -> None:
    """Cached-logits distillation hooks the output layer, and gets logits where that is allowed."""
    from megatron.training.distillation import StudentLogitsCapture

    model = GPT(tensor_model_parallel_size=ranks)
    capture = StudentLogitsCapture()
    capture.attach_hooks(model)
    with pytest.raises(calls.CallDeclinedError, match=r"_capture_logits of distillation"):
        model(**proof.arguments(model))
    with calls.allowing(*HEADS), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the loss without fusion
        model(**proof.arguments(model))
    assert capture.pop().shape == (S, B, V // ranks)


@contextlib.contextmanager
def spoken() -> Iterator[list[str]]:
    """Collect what is logged, including messages that are logged once per process."""
    said: list[str] = []
    with (
        mock.patch.object(op, "_logged", set()),
        mock.patch.object(op._LOG, "warning", side_effect=said.append),
    ):
        yield said


def check_logged_logits(ranks: int) -> None:
    """GPTModel can write its logits to disk, and then they must exist."""
    from megatron.core.models.gpt import gpt_model

    model = GPT(tensor_model_parallel_size=ranks)
    model.config.config_logger_dir = "somewhere"
    with mock.patch.object(gpt_model, "log_config_to_disk") as log:
        model(**proof.arguments(model))
    assert log.call_args.args[1]["logits"].shape == (S, B, V // ranks)


def check_mtp_without_labels(ranks: int) -> None:
    """Reinforcement learning needs the logits, and trains MTP on the tokens since 0.19."""
    logs = []
    for flag in ({}, OFF):
        model = GPT(mtp=2, tensor_model_parallel_size=ranks, **flag)
        with mtp_log() as logged:
            logits = model(**proof.arguments(model, labels=None))
        gradients = torch.autograd.grad(
            logits.sum(), list(model.parameters()), allow_unused=True, materialize_grads=True
        )
        logs.append([logits, *logged, *gradients])
    torch.testing.assert_close(*logs, rtol=2e-5, atol=2e-6)


def save_checkpoint(model: Any, folder: Path) -> None:
    from megatron.core import dist_checkpointing

    keep_saves_here()
    folder.mkdir()
    dist_checkpointing.save(model.sharded_state_dict(metadata=metadata()), str(folder))


def check_checkpoint(folder: Path) -> None:
    """The patched model loads a stock checkpoint, and computes stock's loss."""
    from megatron.core import dist_checkpointing

    model = GPT(mtp=2)
    wanted = {name: value.clone() for name, value in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    loaded = dist_checkpointing.load(model.sharded_state_dict(metadata=metadata()), str(folder))
    model.load_state_dict(loaded)
    for name, value in model.named_parameters():
        assert torch.equal(value, wanted[name]), name


def metadata() -> dict[str, Any]:
    from megatron.core import parallel_state

    return {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
