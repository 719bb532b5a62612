"""The line that Megatron prints for a logged step, read back."""

from __future__ import annotations

import re

from cppmega.runs.metrics import LoggedStep

_STEP = re.compile(r"iteration\s+(\d+)/\s*(\d+)\s*\|")
_VALUE = re.compile(r"\|?\s*([A-Za-z][^|:]*?)\s*(?:\([^|)]*\))?:\s+([-+.\dEe]+|nan|inf)\s*\|")
_ELAPSED = "elapsed time per iteration"
THROUGHPUT = "throughput per GPU"


def read(message: str, tokens: float) -> tuple[LoggedStep, dict[str, float]] | None:
    """The step of a line, and all of its values; None for any other message.

    Args:
        message: what Megatron prints.
        tokens: those of a step.
    """
    step = _STEP.search(message)
    values = {key.strip(): float(value) for key, value in _VALUE.findall(message)}
    if step is None or not values.get(_ELAPSED):
        return None
    seconds = values[_ELAPSED] / 1000
    logged = LoggedStep(
        step=int(step[1]),
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        loss=values.get("lm loss"),
        grad_norm=values.get("grad norm"),
        losses={key: value for key, value in values.items() if key.endswith("loss")},
    )
    return logged, values
