"""A process that has imported one tree, and forks the ranks of each configuration it is sent.

Importing torch and Megatron takes longer than most configurations. Orders come as lines of JSON on
standard input, and each is answered by a line on standard output. Every configuration has new
processes: no state is left from the one before it, and one that hangs can be killed.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import select
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from cppmega import process, receipt, runtime
from cppmega.overlay import Session
from tests.configurations.settings import Configuration

GRACE = 2.0
"""Seconds for the other ranks after one has failed: they may wait for it for ever."""
LIMIT = 240.0
"""Seconds for a configuration."""


def serve(root: str) -> None:
    """Answer orders until standard input is closed."""
    process.end_with_parent(number=signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints must not be taken for an answer
    _import(Path(root))
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(_answer(order)), file=answers, flush=True)


def _import(root: Path) -> None:
    """The tree with its runtime pages armed, as `cppmega.run` arms them."""
    import torch

    torch.set_num_threads(1)
    torch._dynamo.config.disable = True  # what is fused is compared as it is written
    session = Session(root)
    applied = receipt.load(session.tree).receipt  # of stock: empty
    edits = session.plan(None, applied.gates).edits
    for name in applied.pages:
        runtime.arm(session.pages[name], edits[name])
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from tests.configurations import stand_ins, training

    assert training
    stand_ins.install()
    runtime.check()
    # It would start a process for the results of writers that are other processes.
    filesystem_async._results_queue = queue.Queue()
    logging.disable(logging.CRITICAL)


def _answer(order: dict[str, Any]) -> dict[str, Any]:
    """Run an order's configuration on ranks of its own."""
    setting = Configuration(**order["configuration"])
    with tempfile.TemporaryDirectory() as scratch:
        reports, seconds = _forked(setting, order, Path(scratch) / "store")
    errors = [report["error"] for report in reports if report.get("error")]
    stages = [set(report["rows"]) for report in reports]
    return {
        "rows": {name: _joined(reports, name) for name in order["stages"] if _all(stages, name)},
        "error": min(errors, key=lambda error: error["time"]) if errors else None,
        "seconds": round(seconds, 2),
    }


def _all(stages: list[set[str]], name: str) -> bool:
    return all(name in stage for stage in stages)


def _joined(reports: list[dict[str, Any]], stage: str) -> dict[str, Any]:
    """One row of all ranks; every pipeline's last stage has losses."""
    rows = [report["rows"][stage] for report in reports]
    return {
        "losses": [loss for row in rows for loss in row["losses"]],
        "gradient": rows[0]["gradient"],
        "weights": [row["weights"] for row in rows],
    }


def _forked(
    setting: Configuration, order: dict[str, Any], store: Path
) -> tuple[list[dict[str, Any]], float]:
    """The report of each rank, nothing from one that hangs; and their processor time."""
    ranks: dict[int, tuple[int, int]] = {}  # the file it reports to -> rank and process
    for rank in range(setting.ranks):
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.close(reader)
            _be_a_rank(setting, order, store, rank, writer)
        os.close(writer)
        ranks[reader] = rank, child
    reports: list[dict[str, Any]] = [{} for _ in ranks]
    deadline = time.monotonic() + LIMIT
    missing = set(ranks)
    while missing and (left := deadline - time.monotonic()) > 0:
        for reader in select.select(list(missing), [], [], left)[0]:
            missing.remove(reader)
            text = os.fdopen(reader).readline()
            report = json.loads(text) if text else {"rows": {}, "error": _died()}
            reports[ranks[reader][0]] = report
            if report.get("error"):
                deadline = min(deadline, time.monotonic() + GRACE)
    seconds = 0.0
    for reader, (rank, child) in ranks.items():
        os.kill(child, signal.SIGKILL)
        usage = os.wait4(child, 0)[2]
        seconds += usage.ru_utime + usage.ru_stime
        if reader in missing:
            os.close(reader)
            reports[rank] = {"rows": {}, "error": None}
    if missing and not any(report["error"] for report in reports):
        reports[0]["error"] = {"type": "Hung", "message": f"after {LIMIT:.0f} s", "time": 0.0}
    return reports, seconds


def _died() -> dict[str, Any]:
    return {"type": "Died", "message": "a rank ended without a report", "time": time.time()}


def _be_a_rank(
    setting: Configuration, order: dict[str, Any], store: Path, rank: int, writer: int
) -> None:
    """Report to the file, and wait to be killed: a closed connection would fail the others too."""
    report: dict[str, Any] = {"rows": {}, "error": None}
    try:
        process.end_with_parent(number=signal.SIGKILL)
        _join(setting, store, rank)
        from tests.configurations import training

        stages = getattr(training, order["phase"])(setting, Path(order["folder"]))
        for name, row in stages:
            report["rows"][name] = row
    except BaseException as error:
        if "CONFIGURATIONS_TRACE" in os.environ:
            traceback.print_exc()
        place = traceback.extract_tb(error.__traceback__)[-1]
        report["error"] = {
            "type": type(error).__name__,
            "message": str(error).strip().rpartition("\n")[2][:300],
            "place": f"{Path(place.filename).name}:{place.name}",
            "time": time.time(),
        }
    os.write(writer, json.dumps(report).encode() + b"\n")
    while True:
        signal.pause()


def _join(setting: Configuration, store: Path, rank: int) -> None:
    import torch
    from megatron.core import parallel_state

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=setting.ranks
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=setting.tensor,
        pipeline_model_parallel_size=setting.pipeline,
        context_parallel_size=setting.context,
    )
