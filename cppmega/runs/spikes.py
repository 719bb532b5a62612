"""Spikes of the loss and of the gradient norm: values far above the preceding ones."""

from __future__ import annotations

from collections import deque
from statistics import median

_WINDOW = 50
"""Number of preceding logged steps with which a value is compared."""
_LEAST = 10
"""Fewest logged steps from which a usual value is derived."""
_DEVIATIONS = 8.0
"""Number of usual deviations from the median from which a value is a spike."""
_RATIOS = {"loss": 1.05, "grad norm": 2.0}
"""The smallest spike, as a multiple of the median."""


class Spikes:
    """The last values of a run."""

    def __init__(self) -> None:
        self._last = {name: deque[float](maxlen=_WINDOW) for name in _RATIOS}

    def remark(self, loss: float | None, grad_norm: float | None) -> str:
        """Describe the spikes of a logged step, and remember its values; empty if it has none."""
        values = {"loss": loss, "grad norm": grad_norm}
        spikes = [self._of(name, value) for name, value in values.items() if value is not None]
        return ", ".join(filter(None, spikes))

    def _of(self, name: str, value: float) -> str:
        last = list(self._last[name])
        self._last[name].append(value)
        if len(last) < _LEAST:
            return ""
        usual = median(last)
        limit = usual + max(_DEVIATIONS * _deviation(last), (_RATIOS[name] - 1) * abs(usual))
        if value <= limit:
            return ""
        return f"{name} {value:.4g} (median of the last {len(last)}: {usual:.4g})"


def _deviation(values: list[float]) -> float:
    """The median distance from the median, scaled to a standard deviation of normal values."""
    middle = median(values)
    return 1.4826 * median(abs(value - middle) for value in values)
