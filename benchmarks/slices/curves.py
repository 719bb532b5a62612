"""Curves of small models that Adam trains on few batches, and how far from each other they may be.

Few batches are repeated, so that there is something to learn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

BATCHES, RATE = 4, 1e-3
FACTOR = 2.0
"""Times the largest difference of two references that a curve may differ from the nearest one."""
ROUNDING = 2.0**-22
"""Of a value in fp32: what curves may differ by whose references are equal to the bit."""

Curves = Mapping[str, Sequence[float]]


def trained(
    model: Any,
    batch: Callable[[int], dict[str, Any]],
    steps: int,
    nudge: float = 0.0,
    all_learn: bool = False,
) -> dict[str, list[float]]:
    """Losses and gradient norms of a few steps of Adam on fp32 copies of the weights.

    `batch` gives what the model is called with, by the number of the batch. Every weight begins
    `nudge` away, relative to itself. With `all_learn`, every parameter must have a gradient.
    """
    parameters = list(model.parameters())
    copies = [p.detach().float().cpu().clone() for p in parameters]
    drawn = torch.Generator().manual_seed(3)
    for each in copies if nudge else ():
        each *= 1 + nudge * (torch.randint(2, each.shape, generator=drawn) * 2 - 1)
    optimizer = torch.optim.Adam(copies, RATE)
    found: dict[str, list[float]] = {"loss": [], "grad norm": []}
    for step in range(steps):
        with torch.no_grad():
            for parameter, copy in zip(parameters, copies, strict=True):
                parameter.copy_(copy)
                parameter.grad = None
        value = model(**batch(step % BATCHES)).float().mean()
        value.backward()
        for parameter, copy in zip(parameters, copies, strict=True):
            assert parameter.grad is not None or not all_learn, "a parameter has no gradient"
            copy.grad = None if parameter.grad is None else parameter.grad.float().cpu()
        gradients = [copy.grad for copy in copies if copy.grad is not None]
        found["loss"].append(value.item())
        found["grad norm"].append(torch.nn.utils.get_total_norm(gradients).item())
        optimizer.step()
    return found


def verdict(
    curve: Sequence[float], references: Sequence[Sequence[float]], rounding: float = ROUNDING
) -> list[str]:
    """Noise of the references, distance of a curve from the nearest one, and what that means."""
    if any(len(each) != len(curve) for each in references):
        return ["", "", "the runs have other steps"]
    pairs = itertools.combinations(references, 2)
    noise = max(abs(a - b) for one, other in pairs for a, b in zip(one, other, strict=True))
    gap = max(
        min(abs(value - each[step]) for each in references) for step, value in enumerate(curve)
    )
    finite = all(map(math.isfinite, (*curve, noise)))
    within = finite and gap <= max(FACTOR * noise, rounding * max(map(abs, curve)))
    return [f"{noise:.2e}", f"{gap:.2e}", "within the noise" if within else "**beyond the noise**"]


def judged(runs: Mapping[str, Curves], references: Sequence[str], form: str) -> list[list[str]]:
    """Rows of a table: a run's curve, first and last value, and the verdict on it."""
    known = [runs[name] for name in references if name in runs]
    rows = []
    for name, run in runs.items():
        for what in ("loss", "grad norm"):
            found = verdict(run[what], [each[what] for each in known])
            found = ["", "", "reference"] if name in references else found
            rows.append([f"{name}, {what}", *(f"{run[what][at]:{form}}" for at in (0, -1)), *found])
    return rows
