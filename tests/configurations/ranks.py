"""A process that has imported one tree, and forks the ranks of each configuration it is sent.

Importing torch and Megatron takes longer than most configurations. Orders come as lines of JSON on
standard input, and each is answered by a line on standard output. Every configuration has new
processes: no state is left from the one before it, and one that hangs can be killed.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cppmega.guard import swaps
from cppmega.host import process
from cppmega.overlay import receipt
from cppmega.overlay.verbs import Session
from cppmega.proof.cpu_shims import keep_saves_here
from tests.configurations.settings import Configuration

GRACE = 15.0
"""Seconds for the other ranks after one has failed: they may wait for it for ever."""
SHORT = 1.0
"""Seconds for their errors, once they have told as many stages as the one that failed."""
LIMIT = 900.0
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
    applied = receipt.load(session.read_tree()).receipt  # of stock: empty
    edits = session.plan(None, applied.gates).edits
    for name in applied.pages:
        swaps.arm(session.pages[name], edits[name])
    from tests.configurations import stand_ins, training

    assert training
    stand_ins.import_late()
    stand_ins.install()
    swaps.check()
    keep_saves_here()
    logging.disable(logging.CRITICAL)
    gc.freeze()  # a collection in a rank would walk through all of it, and copy its pages


def _answer(order: dict[str, Any]) -> dict[str, Any]:
    """Run an order's configuration on ranks of its own."""
    setting = Configuration(**order["configuration"])
    with tempfile.TemporaryDirectory() as scratch:
        ranks = _forked(setting, order, Path(scratch) / "store")
    rows = [rank.rows for rank in ranks]
    errors = [rank.error for rank in ranks if rank.error]
    return {
        "rows": {name: _joined(rows, name) for name in order["stages"] if _all(rows, name)},
        "error": min(errors, key=lambda error: error["time"]) if errors else None,
        "seconds": round(sum(rank.seconds for rank in ranks), 2),
    }


def _all(rows: list[dict[str, Any]], stage: str) -> bool:
    return all(stage in row for row in rows)


def _joined(ranks: list[dict[str, Any]], stage: str) -> dict[str, Any]:
    """One row of all ranks; every pipeline's last stage has losses."""
    rows = [rank[stage] for rank in ranks]
    return {
        "losses": [loss for row in rows for loss in row["losses"]],
        "gradient": rows[0]["gradient"],
        "weights": [row["weights"] for row in rows],
    }


@dataclass
class Rank:
    """A forked process, and what it has told so far."""

    process: int
    reader: int
    rows: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    seconds: float = 0.0
    """Of processor time."""
    ended: bool = False
    _text: bytes = b""

    def read(self) -> None:
        """Take what has arrived; called when something has."""
        new = os.read(self.reader, 2**16)
        *lines, self._text = (self._text + new).split(b"\n")
        for line in lines:
            told = json.loads(line)
            self.rows |= told.get("rows", {})
            if "error" in told:
                self.error, self.ended = told["error"], True
        if not new:
            message = "a rank ended without a report"
            self.error = {"type": "Died", "message": message, "time": time.time()}
            self.ended = True

    def end(self) -> None:
        """It waits for this, however it went."""
        os.kill(self.process, signal.SIGKILL)
        usage = os.wait4(self.process, 0)[2]
        self.seconds = usage.ru_utime + usage.ru_stime
        os.close(self.reader)


def _forked(setting: Configuration, order: dict[str, Any], store: Path) -> list[Rank]:
    """Run all ranks to their end, or to that of the first that fails and a little longer."""
    ranks = []
    for number in range(setting.ranks):
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            _be_a_rank(setting, order, store, number, writer)
        os.close(writer)
        ranks.append(Rank(child, reader))
    deadline = time.monotonic() + LIMIT
    while (running := [rank for rank in ranks if not rank.ended]) and (
        left := deadline - time.monotonic()
    ) > 0:
        ready = select.select([rank.reader for rank in running], [], [], left)[0]
        for rank in running:
            if rank.reader in ready:
                rank.read()
        failed = max((len(rank.rows) for rank in ranks if rank.error), default=None)
        if failed is not None:
            level = all(len(rank.rows) >= failed for rank in ranks)
            deadline = min(deadline, time.monotonic() + (SHORT if level else GRACE))
    for rank in ranks:
        rank.end()
    if running and not any(rank.error for rank in ranks):
        running[0].error = {"type": "Hung", "message": f"after {LIMIT:.0f} s", "time": 0.0}
    return ranks


def _be_a_rank(
    setting: Configuration, order: dict[str, Any], store: Path, rank: int, writer: int
) -> None:
    """Report to the file, and wait to be killed: a closed connection would fail the others too."""

    def tell(**what: Any) -> None:
        os.write(writer, json.dumps(what).encode() + b"\n")

    try:
        process.end_with_parent(number=signal.SIGKILL)
        _join(setting, store, rank)
        from tests.configurations import training

        stages = getattr(training, order["phase"])(setting, Path(order["folder"]))
        for name, row in stages:
            tell(rows={name: row})
        tell(error=None)
    except BaseException as error:
        if "CONFIGURATIONS_TRACE" in os.environ:
            traceback.print_exc()
        tell(error=_described(error))
    while True:
        signal.pause()


def _described(error: BaseException) -> dict[str, Any]:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return {
        "type": type(error).__name__,
        "message": str(error).strip().rpartition("\n")[2][:300],
        "place": f"{Path(place.filename).name}:{place.name}",
        "time": time.time(),
    }


def _join(setting: Configuration, store: Path, rank: int) -> None:
    import torch
    from megatron.core import parallel_state

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=setting.ranks
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=setting.tensor,
        pipeline_model_parallel_size=setting.pipeline,
        virtual_pipeline_model_parallel_size=setting.virtual if setting.virtual > 1 else None,
        context_parallel_size=setting.context,
        expert_model_parallel_size=setting.expert,
        expert_tensor_parallel_size=setting.expert_tensor if setting.experts != "none" else None,
    )
