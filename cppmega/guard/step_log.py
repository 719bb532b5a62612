"""The logged steps of a launched script, for `cppmega runs`, `compare` and their plots."""

from __future__ import annotations

import functools
import importlib
import time
from types import ModuleType
from typing import Any

from cppmega.guard import end_record, imports, ranks
from cppmega.runs import megatron_line, metrics
from cppmega.runs.metrics import LoggedStep

_last: float | None = None
"""When a custom loop logged last."""


def log_step(step: int, **values: Any) -> None:
    """Log a step of a custom loop; only the first rank does, and only in a launch.

    Args:
        step: its number, from 1.
        values: fields of `LoggedStep`, such as `loss`, `grad_norm` and `tokens_per_second`;
            `seconds` is by default the time since the last call.
    """
    global _last
    node = end_record.node_of_this_rank() if ranks.rank() == 0 else None
    if node is None:
        return
    now, before = time.monotonic(), _last
    _last = now
    seconds = now - before if before is not None else 0.0
    metrics.append(node.run.metrics, LoggedStep(step=step, **{"seconds": seconds, **values}))


def watch(training: ModuleType) -> None:
    """Log what Megatron's loop prints about its steps; cppmega's trainer does so itself."""
    node = end_record.node_of_this_rank()
    if node is None or "cppmega.trainer" in node.run.outline.torchrun:
        return
    printed: Any = vars(training)["print_rank_last"]

    @functools.wraps(printed)
    def print_rank_last(message: str) -> None:
        printed(message)
        if not ranks.is_last():
            return
        args = importlib.import_module("megatron.training.global_vars").get_args()
        logged = megatron_line.read(message, args.global_batch_size * args.seq_length)
        if logged is not None:
            metrics.append(node.run.metrics, logged[0])

    imports.replace(training, "print_rank_last", print_rank_last)
