"""Megatron's log line, extended by what it leaves out, and the same numbers as a record.

To the throughput that Megatron reports, the line adds the one with every layer counted, tokens per
second, and, for mock data and for a cut model, a mark that neither a reader nor grep can miss.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import UNSET, UnsetType

from cppmega.recipe import Recipe
from cppmega.recipe.arithmetic import flops
from cppmega.runs import megatron_line
from cppmega.runs import metrics as run_metrics
from cppmega.runs.metrics import LoggedStep, Start
from cppmega.runs.spikes import Spikes
from cppmega.training.expert_load import Load
from cppmega.training.nonfinite import check_step

MOCK = "MOCK DATA"
CUT = "CUT MODEL"
PROFILED = "PROFILED"


class TrainingStart(Start, frozen=True, kw_only=True):
    """The header of a run that Megatron trains."""

    megatron: str
    parameters: int
    arguments: tuple[str, ...]
    dsa_dense_loss_steps: int | UnsetType = UNSET
    """Steps whose indexer loss is dense, before it is sparse; absent where no step is named."""


class Log:
    """The log of a run, which takes the place of Megatron's print function."""

    def __init__(
        self,
        recipe: Recipe,
        world_size: int,
        *,
        mock: bool,
        squares: Callable[[], float | None],
        peak: Callable[[], float],
        metrics: Path | None,
        profiled: Callable[[], bool] = lambda: False,
        graph_pools: Callable[[], float | None] = lambda: None,
        expert_load: Callable[[], Load | None] = lambda: None,
        scalars: Callable[[dict[str, float], int], None] = lambda values, step: None,
    ) -> None:
        """Create the log.

        Args:
            recipe: the run.
            world_size: ranks.
            mock: whether the data are mock data.
            squares: mean document length since the last line, see `ForwardStep.taken_squares`.
            peak: most GPU memory allocated so far on any rank, GiB; called on every rank.
            metrics: file for one JSON object per step; None: none.
            profiled: whether a step since the last line was slower for the profiler.
            graph_pools: what the pools of CUDA graphs reserve on this rank, see `GraphPools.gib`.
            expert_load: how even the experts' load was, see `ExpertLoad.load`.
            scalars: writes what cppmega adds to Megatron's line, such as `to_megatrons_writers`.
        """
        self._scalars = scalars
        self._profiled, self._graph_pools, self._load = profiled, graph_pools, expert_load
        self.recipe, self.world_size, self.mock = recipe, world_size, mock
        self._squares, self._peak, self._metrics = squares, peak, metrics
        self._spikes = Spikes()
        self._cut = f" {CUT}: {recipe.cut} |" if recipe.cut else ""

    def around(
        self, print_last: Callable[[str], None], writes: Callable[[], bool]
    ) -> Callable[[str], None]:
        """Wrap Megatron's print function for the last rank.

        Args:
            print_last: the original.
            writes: whether this rank is the one that prints.
        """

        def logged(message: str) -> None:
            step = self.read(message)
            if step is None:
                print_last(self._cut + message)
                return
            print_last(self.line(message, step))
            if self._metrics is not None and writes():
                run_metrics.append(self._metrics, step)
            if writes():
                self._scalars(scalars_of(step), step.step)
            check_step(step.loss, step.grad_norm)

        return logged

    def read(self, message: str) -> LoggedStep | None:
        """Read a step's line; None for any other message."""
        tokens = self.recipe.global_batch_size * self.recipe.seq_length
        parsed = megatron_line.read(message, tokens)
        if parsed is None:
            return None
        step, values = parsed
        work = flops(self.recipe, self._squares()) * tokens / step.seconds / self.world_size
        return msgspec.structs.replace(
            step,
            tflops_per_gpu=work / 1e12,
            tflops_per_gpu_by_megatron=values.get(megatron_line.THROUGHPUT),
            peak_gib=self._peak(),
            graph_pool_gib=self._graph_pools(),
            expert_load=self._load(),
            mock_data=self.mock,
            profiled=self._profiled(),
        )

    def line(self, message: str, step: LoggedStep) -> str:
        """Append cppmega's numbers to Megatron's line."""
        numbers = (
            f" with every layer counted (TFLOP/s/GPU): {step.tflops_per_gpu:.1f} |"
            f" tokens/s: {step.tokens_per_second:.0f} |"
            f" peak memory (GiB): {step.peak_gib:.1f} |"
        )
        if step.graph_pool_gib is not None:
            numbers += f" CUDA graphs (GiB): {step.graph_pool_gib:.1f} |"
        if step.expert_load:
            least, most = zip(*step.expert_load, strict=True)
            numbers += f" experts' load: {min(least):.2f} to {max(most):.2f} of the mean |"
        numbers += f" {PROFILED} |" * step.profiled
        spike = self._spikes.remark(step.loss, step.grad_norm)
        numbers += f" SPIKE: {spike} |" if spike else ""
        before = self._cut + f" {MOCK} |" * self.mock
        return before + message + numbers + f" {MOCK}" * self.mock


def scalars_of(step: LoggedStep) -> dict[str, float]:
    """What cppmega adds to Megatron's numbers, under the names of a step's record."""
    names = ("tokens_per_second", "tflops_per_gpu", "peak_gib", "graph_pool_gib")
    values = {f"cppmega/{name}": getattr(step, name) for name in names}
    if step.expert_load:
        least, most = zip(*step.expert_load, strict=True)
        values |= {"cppmega/expert_load_min": min(least), "cppmega/expert_load_max": max(most)}
    return {name: value for name, value in values.items() if value is not None}


def to_megatrons_writers(values: dict[str, float], step: int) -> None:
    """Write values with Megatron's writers of TensorBoard and W&B, where it has them."""
    from megatron.training import get_tensorboard_writer, get_wandb_writer

    if (writer := get_tensorboard_writer()) is not None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
    if (writer := get_wandb_writer()) is not None:
        writer.log(values, step)
