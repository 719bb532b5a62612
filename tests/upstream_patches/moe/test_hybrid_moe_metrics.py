"""`training_log` averages the losses of the routers, in a tensor of the right length."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

from cppmega.proof import stand_ins
from tests.upstream_patches import one_process

torch = pytest.importorskip("torch")

PAGE = "hybrid_moe_metrics"
NAME = "load_balancing_loss"
NAM56R = "*EME" * 11 + "*-M-" * 2 + "/*E" * 2  # 22 MoE layers of 52, and one in each of 2 depths


@pytest.mark.megatron
@pytest.mark.parametrize("version", one_process.PAGES[PAGE])
def test_training_log(version: str) -> None:
    one_process.assert_passes(PAGE, version)


def check(stock: one_process.Stock) -> None:
    from megatron.training import training as patched

    from cppmega.proof import cpu_shims

    cpu_shims.init_distributed()
    unpatched = stock.module("megatron.training.training")
    for pattern, of_stock in (
        (NAM56R, 3 * 24 / 26),
        ("M*|EE/ME", 3 * 3 / 4),
        ("MEEM/MM", 3 * 2 / 3),  # no MoE in the depth: the depth was counted as if it had one
        ("MEEM", 3),
    ):
        assert mean_of_threes(patched, pattern) == pytest.approx(3)
        assert mean_of_threes(unpatched, pattern) == pytest.approx(of_stock)
        length = len(pattern.replace("|", "").partition("/")[0]) + pattern.count("/")
        assert length_without_moe(patched, pattern) == length
        assert length_without_moe(unpatched, pattern) < length
    for freq, layers in ((1, 6), (2, 3), ([0, 1, 1, 0, 1, 1], 4)):  # not a hybrid model
        for module in (patched, unpatched):
            assert mean_of_threes(module, None, freq, layers) == pytest.approx(3)


def mean_of_threes(module: ModuleType, pattern: Any, freq: Any = 1, layers: int = 0) -> float:
    """Return the logged mean if every MoE layer records 3."""
    main, *depths = pattern.replace("|", "").split("/") if pattern else ("-" * 6, "E")
    numbers = [at for part in (main, *depths) for at, kind in enumerate(part, 1) if kind == "E"]
    size = len(main) + len(depths)
    with tracker() as (record, _):
        for number in numbers + list(range(1, layers + 1)):
            record(NAME, torch.tensor(3.0), number, size)
        return log(module, pattern, len(main), len(depths), freq)[NAME].item()


def length_without_moe(module: ModuleType, pattern: str) -> int:
    """Return the length of the tensor that a pipeline stage without MoE layers allocates."""
    main, *depths = pattern.replace("|", "").split("/")
    with tracker() as (_, values):
        log(module, pattern, len(main), len(depths), 1)
        return values().numel()


@contextlib.contextmanager
def tracker() -> Iterator[tuple[Any, Any]]:
    """Yield functions that record into an empty tracker, and that read its values."""
    from megatron.core.transformer.moe import moe_utils

    try:
        from megatron.core.transformer.moe import moe_logging
    except ImportError:  # 0.17
        entries = moe_utils.get_moe_layer_wise_logging_tracker()
        entries.clear()
        yield moe_utils.save_to_aux_losses_tracker, lambda: entries[NAME]["values"]
    else:
        moe_logging.destroy_moe_metrics_tracker()
        fresh = moe_logging.get_moe_metrics_tracker()
        yield fresh.record, lambda: fresh.metrics[NAME].values


def log(module: ModuleType, pattern: Any, layers: int, depths: int, freq: Any) -> dict[str, Any]:
    args = stand_ins.Arguments(
        0,
        hybrid_layer_pattern=pattern,
        num_layers=layers,
        mtp_num_layers=depths or None,
        num_experts=4,
        moe_layer_freq=freq,
        moe_router_load_balancing_type=["aux_loss"],
        moe_z_loss_coeff=None,
        log_interval=1000,
    )
    zeros = torch.zeros
    total: dict[str, Any] = {}
    with (
        stand_ins.quiet_training(module, args, is_hybrid_model=lambda _: pattern is not None),
        mock.patch.object(torch, "zeros", lambda *size, **given: zeros(*size)),  # 0.17: on CUDA
        mock.patch.object(torch.distributed, "all_reduce", lambda *_, **__: None),
    ):
        module.training_log({}, total, 0.1, 1, 1.0, False, 0, None, None, None, None)
    return total
