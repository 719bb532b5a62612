"""Megatron's log line with what it leaves out, and the same numbers for machines.

The line gets the throughput with every layer counted beside the one Megatron reports, tokens per
second, and, where the data are mock data, a mark that no reader and no grep can miss.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cppmega.recipe import Recipe
from cppmega.recipe.arithmetic import flops
from cppmega.training.nonfinite import check_row

MOCK = "MOCK DATA"
_STEP = re.compile(r"iteration\s+(\d+)/\s*(\d+)\s*\|")
_VALUE = re.compile(r"\|?\s*([A-Za-z][^|:]*?)\s*(?:\([^|)]*\))?:\s+([-+.\dEe]+|nan|inf)\s*\|")
_ELAPSED = "elapsed time per iteration"
_REPORTED = "throughput per GPU"


Say = Callable[[str], None]


class Log:
    """Stands where Megatron prints a step's line."""

    def __init__(
        self,
        recipe: Recipe,
        world_size: int,
        *,
        mock: bool,
        squares: Callable[[], float | None],
        peak: Callable[[], float],
        metrics: Path | None,
    ) -> None:
        """Make it.

        Args:
            recipe: the run.
            world_size: ranks.
            mock: whether the data are mock data.
            squares: mean document length since the last line, see `ForwardStep.taken_squares`.
            peak: most GPU memory allocated so far on this rank, GiB.
            metrics: file for one JSON object per line; None: none.
        """
        self.recipe, self.world_size, self.mock = recipe, world_size, mock
        self._squares, self._peak, self._metrics = squares, peak, metrics

    def around(
        self, say: Callable[[str], None], writes: Callable[[], bool]
    ) -> Callable[[str], None]:
        """A replacement of Megatron's print function for the last rank.

        Args:
            say: the original.
            writes: whether this rank is the one that prints.
        """

        def spoken(message: str) -> None:
            row = self.read(message)
            if row is None:
                say(message)
                return
            say(self.line(message, row))
            if self._metrics is not None and writes():
                append(self._metrics, row)
            check_row(row["loss"], row["grad_norm"])

        return spoken

    def read(self, message: str) -> dict[str, Any] | None:
        """The numbers of a step's line, and ours; None for any other message."""
        step = _STEP.search(message)
        values = {key.strip(): float(value) for key, value in _VALUE.findall(message)}
        if step is None or not values.get(_ELAPSED):
            return None
        seconds = values[_ELAPSED] / 1000
        tokens = self.recipe.global_batch_size * self.recipe.seq_length / seconds
        work = flops(self.recipe, self._squares()) * tokens / self.world_size
        return {
            "step": int(step[1]),
            "seconds": seconds,
            "tokens_per_second": tokens,
            "tflops_per_gpu": work / 1e12,
            "tflops_per_gpu_by_megatron": values.get(_REPORTED),
            "peak_gib": self._peak(),
            "loss": values.get("lm loss"),
            "grad_norm": values.get("grad norm"),
            "losses": {key: value for key, value in values.items() if key.endswith("loss")},
            "mock_data": self.mock,
        }

    def line(self, message: str, row: Mapping[str, Any]) -> str:
        """Megatron's line with our numbers behind it."""
        said = (
            f" with every layer counted (TFLOP/s/GPU): {row['tflops_per_gpu']:.1f} |"
            f" tokens/s: {row['tokens_per_second']:.0f} |"
            f" peak memory (GiB): {row['peak_gib']:.1f} |"
        )
        return (f" {MOCK} |" if self.mock else "") + message + said + (f" {MOCK}" * self.mock)


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Add one JSON object to a file of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
