"""The forward and the backward plan of a combined step run under both contexts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.upstream_patches import one_process

torch = pytest.importorskip("torch")

PAGE = "combined_1f1b_autocast"


@pytest.mark.megatron
@pytest.mark.parametrize("version", one_process.PAGES[PAGE])
def test_combined_step(version: str) -> None:
    one_process.assert_passes(PAGE, version)


def check(stock: one_process.Stock) -> None:
    from megatron.core.pipeline_parallel import combined_1f1b as patched

    unpatched = stock.module("megatron.core.pipeline_parallel.combined_1f1b")
    bf16, fp32 = torch.bfloat16, torch.float32
    for module, under_autocast in ((patched, bf16), (unpatched, fp32)):
        assert dtypes(module, autocast=True, fp8=False) == [under_autocast, under_autocast]
        assert dtypes(module, autocast=False, fp8=False) == [fp32, fp32]
        assert dtypes(module, autocast=True, fp8=True) == ["fp8", under_autocast, under_autocast]
        assert dtypes(module, autocast=False, fp8=True) == ["fp8", fp32, fp32]
    both_end_with_an_exception(patched)


def dtypes(module: ModuleType, autocast: bool, fp8: bool, fail: bool = False) -> list[Any]:
    """Return what ran: the FP8 context, then the dtypes of a product in forward and backward."""
    ran: list[Any] = []

    @contextlib.contextmanager
    def fp8_context(*_: Any, **__: Any) -> Iterator[None]:
        ran.append("fp8")
        try:
            yield
        finally:
            ran.append("no fp8")

    class Plan(module.AbstractSchedulePlan):
        event = None

        @classmethod
        def run(cls, forward: Any, backward: Any, **_: Any) -> Any:
            for plan in (forward, backward):
                assert isinstance(plan, Plan)
                ran.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
            if fail:
                raise InterruptedError
            return torch.ones(1)

    from megatron.core.models.gpt import GPTModel  # the only kind that 0.16 and 0.17 take

    output = torch.ones(1)
    output.schedule_plan, output.loss_func = Plan(), None
    model = mock.MagicMock(spec=["set_input_tensor", "build_schedule_plan"])
    config = SimpleNamespace(
        enable_autocast=autocast,
        autocast_dtype=torch.bfloat16,
        timers=None,
        grad_scale_func=None,
        fp8="hybrid" if fp8 else None,
        fp8_recipe="delayed",
    )
    on_cpu = torch.autocast
    with (
        mock.patch.object(torch, "autocast", lambda device, **given: on_cpu("cpu", **given)),
        mock.patch.object(module, "get_fp8_context", fp8_context),
        mock.patch.object(module, "get_attr_wrapped_model", lambda *_, **__: mock.Mock(GPTModel)),
        mock.patch.object(module, "ScheduleNode", mock.Mock()),
        mock.patch.object(torch.cuda, "current_stream", mock.Mock()),
        mock.patch(
            "megatron.core.pipeline_parallel.schedules.forward_step_calc_loss",
            lambda *_, **__: (torch.ones(1), torch.ones(1)),
        ),
    ):
        module.combined_forward_backward_step(
            forward_step_func=lambda *_, **__: (Plan(), None),
            data_iterator=None,
            f_model=model,
            num_microbatches=1,
            input_tensor=None,
            forward_data_store=[],
            b_model=model,
            b_input_tensor=None,
            b_output_tensor=output,
            b_output_tensor_grad=torch.ones(1),
            config=config,
        )
    return [entry for entry in ran if entry != "no fp8"]


def both_end_with_an_exception(module: ModuleType) -> None:
    with pytest.raises(InterruptedError):
        dtypes(module, autocast=True, fp8=True, fail=True)
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
