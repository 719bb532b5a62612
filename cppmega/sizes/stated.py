"""Sizes of a model's parts, stated in an environment variable as JSON.

The trainer states the recipe's sizes; patched code reads them in the ranks. This module does not
import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from cppmega.errors import CppmegaError
from cppmega.host import env, json_text

LARGEST = 2**40
"""Far above every size of a run; arithmetic with larger ones would take forever or overflow."""
Count = Annotated[int, Meta(ge=0, le=LARGEST)]
Positive = Annotated[int, Meta(ge=1, le=LARGEST)]
PositiveReal = Annotated[float, Meta(gt=0)]
Sizes = TypeVar("Sizes")


def text(sizes: Any) -> str:
    """The sizes as the value of a variable; "" for None."""
    return msgspec.json.encode(sizes).decode() if sizes is not None else ""


def read(
    variable: env.Variable[str], kind: type[Sizes], environ: Mapping[str, str]
) -> Sizes | None:
    """Read the sizes that a variable states; None: the model has no such part.

    Args:
        variable: the variable of the part.
        kind: a dataclass of sizes; its attribute `problem`, if any, says why they contradict.
        environ: the environment of the rank.

    Raises:
        CppmegaError: `sizes-misstated`.
    """
    stated = variable.read(environ)
    if not stated:
        return None
    try:
        sizes = json_text.decode(stated, kind)
    except msgspec.DecodeError as error:
        raise _misstated(variable, str(error)) from error
    if reason := getattr(sizes, "problem", ""):
        raise _misstated(variable, reason)
    return sizes


def _misstated(variable: env.Variable[str], reason: str) -> CppmegaError:
    return CppmegaError(
        "sizes-misstated",
        f"{variable.name} does not state the sizes of a part of the model: {reason}.",
        "The model would have other parameters than its recipe.",
        f"unset {variable.name}, and let the trainer set it from the recipe's field",
    )
