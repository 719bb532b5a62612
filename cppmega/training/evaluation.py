"""Held-out losses of a run: always on the same samples, separately for the head and each MTP depth.

Megatron's training loop decides when to evaluate, disables what must not run meanwhile and stops
its clock; its `evaluate` runs the passes and sums over replicas. This module adds fixed samples
(stock continues where the last evaluation ended) and the losses of MTP depths, which stock leaves
out, and ensures that no state of the training changes: no random state, no tracker of losses, no
count of documents. With gradients off, Megatron itself counts no tokens for the bias of experts,
and computes no loss of routers and indexers.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cppmega.recipe import Recipe
from cppmega.runs import metrics as run_metrics
from cppmega.runs.metrics import HeldOutLoss
from cppmega.training.batch import Batch, DataTokens, datasets
from cppmega.training.log import to_megatrons_writers
from cppmega.training.nonfinite import unwrapped
from cppmega.training.step import ForwardStep, Loss

if TYPE_CHECKING:
    import torch

SEED = 1234
"""Seed for the order of held-out samples: the same samples for runs with different seeds."""


class HeldOut:
    """The held-out samples of a run."""

    def __init__(
        self, recipe: Recipe, tokens: DataTokens, prefixes: Sequence[str], cache: str | None
    ) -> None:
        """Describe the samples.

        Args:
            recipe: the run.
            tokens: end of document and vocabulary of the data.
            prefixes: held-out datasets; empty: mock data.
            cache: folder for sample indices; None: next to the data.
        """
        self.recipe = recipe
        self._place = tokens, prefixes, cache
        self._loader: Any = None

    def build(self) -> None:
        """Build the dataset, on all ranks together; does nothing the second time."""
        if self._loader is not None or not self.recipe.eval_iters:
            return
        from megatron.training.datasets.data_samplers import build_pretraining_data_loader

        count = self.recipe.eval_iters * self.recipe.global_batch_size
        samples, _, _ = datasets(self.recipe, *self._place, (count, 0, 0), SEED)
        self._loader = build_pretraining_data_loader(samples, 0)

    def batches(self) -> Iterator[dict[str, torch.Tensor]]:
        """The micro-batches of this replica, from the first one on."""
        self.build()
        return iter(self._loader)


class Evaluation:
    """Takes the place of Megatron's `evaluate_and_print_results`."""

    def __init__(
        self,
        step: ForwardStep,
        held_out: HeldOut,
        *,
        mock: bool,
        metrics: Path | None,
        writes: Callable[[], bool],
    ) -> None:
        """Create the evaluation of a run.

        Args:
            step: the run's forward step.
            held_out: the samples.
            mock: whether they are mock data.
            metrics: file for one JSON object per evaluation; None: none.
            writes: whether this rank is the one that has the losses, and writes them.
        """
        self._step, self._held_out = step, held_out
        self._mock, self._metrics, self._writes = mock, metrics, writes
        self._last: int | None = None

    def evaluate(
        self,
        prefix: str,
        forward_step_func: Any,
        data_iterator: Any,
        model: list[Any],
        iteration: int,
        process_non_loss_data_func: Any,
        config: Any,
        verbose: bool = False,
        write_to_tensorboard: bool = True,
        non_loss_data_func: Any = None,
        **groups: Any,
    ) -> None:
        """Evaluate the model, with the arguments of Megatron's function."""
        if iteration == self._last:
            return  # Megatron evaluates once more when the training has ended
        self._last = iteration
        from megatron.training import training

        started = time.perf_counter()
        with self._state_preserved():
            each = [self._held_out.batches() for _ in model]
            batches = each if len(each) > 1 else each[0]  # one for each virtual stage
            iters = self._held_out.recipe.eval_iters
            sums, _, _ = training.evaluate(
                self.forward_step, batches, model, None, config, False, None, iters, **groups
            )
        if sums:
            losses = {name: float(loss) for name, loss in sums.items()}
            self._report(iteration, losses, time.perf_counter() - started)

    def forward_step(
        self, data_iterator: Iterator[dict[str, torch.Tensor]], model: Any
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], Loss]]:
        """Run the forward pass of one held-out micro-batch."""
        helper, heads = _loss_helper(), unwrapped(model)
        batch = self._step.read(data_iterator)
        helper.tracker = {}
        heads.training = True  # MTP heads check it to decide whether to report their losses
        try:
            output = self._step.forward(batch, model)
        finally:
            heads.training = False
        values = helper.tracker.get("loss_values", helper.tracker.get("values"))  # renamed in 0.19
        depths = _depth_losses(batch, values) if values is not None else {}
        return output, partial(self._loss, batch, depths)

    def _loss(
        self, batch: Batch, depths: dict[str, torch.Tensor], output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        total, tokens, report = self._step.loss(batch.loss_mask, output)
        return total, tokens, report | depths

    @contextlib.contextmanager
    def _state_preserved(self) -> Iterator[None]:
        """Preserve what evaluation would change: random states and the training's MTP losses."""
        helper = _loss_helper()
        kept = helper.tracker
        try:
            with _random_states_kept(self._step.device):
                yield
        finally:
            helper.tracker = kept

    def _report(self, step: int, losses: dict[str, float], seconds: float) -> None:
        from megatron.training import training

        recipe = self._held_out.recipe
        tokens = recipe.eval_iters * recipe.global_batch_size * recipe.seq_length
        row = HeldOutLoss(
            evaluated=step, losses=losses, tokens=tokens, seconds=seconds, mock_data=self._mock
        )
        training.print_rank_last(line(row))
        if self._metrics is not None and self._writes():
            run_metrics.append(self._metrics, row)
        if self._writes():
            values = {f"{name} validation": loss for name, loss in losses.items()}
            to_megatrons_writers(values, step)


def line(row: HeldOutLoss) -> str:
    """An evaluation as a line of the log."""
    mark = " MOCK DATA |" * row.mock_data
    losses = "".join(f" {name}: {loss:.6E} |" for name, loss in row.losses.items())
    return (
        f"{mark} held-out loss after step {row.evaluated:8d} |{losses} tokens: {row.tokens} |"
        f" seconds: {row.seconds:.1f} |{mark}"
    )


def _depth_losses(batch: Batch, means: torch.Tensor) -> dict[str, torch.Tensor]:
    """The sum of each depth's losses in a micro-batch, and the number of tokens that have one.

    Args:
        batch: the micro-batch.
        means: fp32 [depths]: the mean over those tokens.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    group = parallel_state.get_context_parallel_group()
    mask, losses = batch.loss_mask, {}
    for depth, mean in enumerate(means, start=1):
        mask, count = roll_tensor(
            mask, shifts=-1, dims=-1, cp_group=group, packed_seq_params=batch.packed_seq_params
        )
        losses[f"mtp_{depth} loss"] = torch.stack([mean.detach() * count, count.to(mean.dtype)])
    return losses


def _loss_helper() -> Any:
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    return MTPLossLoggingHelper


@contextlib.contextmanager
def _random_states_kept(device: Any) -> Iterator[None]:
    """Restore the random states, from which a restarted loader, for example, draws."""
    import numpy as np
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    own, numpys, tracker = random.getstate(), np.random.get_state(), get_cuda_rng_tracker()
    states = tracker.get_states()
    with torch.random.fork_rng([device] if torch.device(device).type == "cuda" else []):
        try:
            yield
        finally:
            tracker.set_states(states)
            np.random.set_state(numpys)
            random.setstate(own)
