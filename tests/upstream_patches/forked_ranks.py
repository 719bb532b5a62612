"""Models on forked ranks, for checks that would take longer to import than to run.

Imported in the process that runs a tree, never by pytest itself. One process imports the tree and
runs every check; a rank is a fork of it.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from cppmega.errors import CppmegaError
from cppmega.host import process
from cppmega.proof.cpu_shims import keep_saves_here
from tests.configurations import models, stand_ins
from tests.configurations.batches import Batch
from tests.configurations.settings import Configuration
from tests.upstream_patches.optimizer.distributed_optimizer import on_cpu

configured_with_dropout = models.configured
numbers = itertools.count()


def prepare() -> None:
    """Import and replace everything once, before ranks are forked."""
    process.adopt_orphans()
    torch.set_num_threads(1)
    torch._dynamo.config.disable = True
    stand_ins.import_late()
    stand_ins.install()
    keep_saves_here()
    gc.freeze()  # Megatron collects in every rank, which would walk through all that is imported


def on_ranks(
    folder: Path, setting: Configuration, work: Callable[..., Any], *given: Any
) -> list[Any]:
    """What `work(setting, *given)` returns on every rank of a layout, each a fork of this one."""
    store = folder / f"store{next(numbers)}"
    children = []
    for rank in range(setting.ranks):
        child = os.fork()
        if child == 0:
            _be_a_rank(rank, setting, store, partial(work, setting, *given))
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    process.end_children()  # what a rank has started would hold the output of this process open
    if any(statuses):
        raise RuntimeError(store.with_suffix(".error").read_text())
    return [pickle.loads(store.with_suffix(f".{n}").read_bytes()) for n in range(setting.ranks)]


def _be_a_rank(rank: int, setting: Configuration, store: Path, work: Callable[[], Any]) -> None:
    status = 1
    process.end_with_parent(number=signal.SIGKILL)
    try:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=setting.ranks
        )
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=setting.tensor,
            pipeline_model_parallel_size=setting.pipeline,
            context_parallel_size=setting.context,
            expert_model_parallel_size=setting.expert,
        )
        store.with_suffix(f".{rank}").write_bytes(pickle.dumps(work()))
        status = 0
    except BaseException:
        store.with_suffix(".error").write_text(traceback.format_exc())
    os._exit(status)


def without_dropout(setting: Configuration) -> Any:
    """The configuration in fp32 and without dropout, so that layouts can be compared."""
    made = configured_with_dropout(replace(setting, optimizer="float32"))
    made.hidden_dropout = 0.0
    return made


def comparable(setting: Configuration) -> Any:
    """As `without_dropout`, with the loss of `summed`: a mean of means depends on the layout."""
    made = without_dropout(setting)
    made.calculate_per_token_loss = True
    return made


def summed(batch: Batch, per_token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The loss of a micro-batch under `--calculate-per-token-loss`."""
    total = (per_token.float() * batch.loss_mask).sum()
    return total, batch.loss_mask.sum().int(), float(total.detach())


def trained(
    make: Callable[[Configuration], Any],
    setting: Configuration,
    steps: range,
    load: Path | None = None,
    save: Path | None = None,
) -> tuple[list[Any], dict[str, torch.Tensor], list[str]]:
    """Rows of training steps, the parameters after them, and which had no gradient.

    Args:
        make: builds a `training.Run`.
        setting: its configuration.
        steps: their numbers.
        load: a checkpoint to begin from.
        save: folder for one after the steps.
    """
    with on_cpu():
        run = make(setting)
        if load is not None:
            run.load(load)
        rows = [run.step(number) for number in steps]
        if save is not None:
            save.mkdir(exist_ok=True)
            torch.distributed.barrier()
            run.save(save)
        named = dict(run.model.named_parameters())
        still = [name for name, p in named.items() if not p.main_grad.any()]
        return rows, {name: p.detach().clone() for name, p in named.items()}, still


def assert_same(one: list[Any], many: list[Any], name: str) -> None:
    """Compare losses and norms of two layouts, whose ranks returned what `trained` does."""
    for step in range(len(one[0][0])):
        ours, theirs = (  # the ranks of a stage are not those of another layout
            sorted(loss for rows, *_ in ranks for loss in rows[step]["losses"])
            for ranks in (many, one)
        )
        if len(ours) > len(theirs):  # each context rank has the losses of its own tokens
            parts = filter(None, (rows[step]["losses"] for rows, *_ in many))
            ours = sorted(map(sum, zip(*parts, strict=True)))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0, msg=f"{name}, step {step}")
        norms = [ranks[0][0][step]["gradient"] for ranks in (many, one)]
        torch.testing.assert_close(*norms, rtol=1e-5, atol=0, msg=f"{name}, norm {norms}")


def refusal(call: Callable[[], Any]) -> str:
    """The name of the error that a call raises."""
    try:
        call()
    except CppmegaError as error:
        return error.name
    return "nothing was refused"


def report(checks: Mapping[str, Any], names: Iterable[str]) -> None:
    """Print what these of the checks return, and the traceback of each that fails."""
    prepare()
    with tempfile.TemporaryDirectory() as scratch:
        answers = {name: _answer(checks[name], Path(scratch)) for name in names}
    sys.stdout.flush()
    print(json.dumps(answers))


def _answer(check: Callable[[Path], Any], folder: Path) -> Any:
    try:
        return check(folder)
    except Exception:
        return traceback.format_exc()
