"""The law: whatever stock can do, patched can do, and with the same results to the bit.

A page that says under `Numerics:` that it changes results is excused where it does, by name, and
within a bound. What is excused nowhere has to be equal: losses, gradient norms and parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tests.configurations.settings import Configuration

Record = dict[str, Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Excuse:
    """Where a page may change results, and by how much: relative differences to stock."""

    pages: tuple[str, ...]
    when: Callable[[Configuration], bool]
    loss: float
    gradient: float
    first_loss_is_same: bool = False
    """It touches gradients alone: the loss before the first update must be stock's."""


EXCUSES = (
    Excuse(
        ("linear_ce_gpt_head", "linear_ce_hybrid_head", "mtp_linear_ce"),
        lambda c: c.loss == "linear" and c.optimizer != "float32",
        loss=1e-4,
        gradient=5e-3,
    ),
    Excuse(
        ("linear_ce_gpt_head", "linear_ce_hybrid_head", "mtp_linear_ce"),
        lambda c: c.loss == "linear" and c.optimizer == "float32",
        loss=1e-6,
        gradient=1e-5,
    ),
    Excuse(
        ("float16_keep_fp32",),
        lambda c: c.model == "hybrid" and c.optimizer != "float32",
        loss=1e-3,
        gradient=1e-2,
    ),
    Excuse(
        ("grad_accumulation_without_apex",),
        lambda c: c.gradients == "fused" and c.optimizer != "float32",
        loss=2e-3,
        gradient=1e-2,
        first_loss_is_same=True,
    ),
    Excuse(
        ("grad_accumulation_without_apex",),
        lambda c: c.gradients == "fused" and c.optimizer == "float32",
        loss=1e-5,
        gradient=1e-5,
        first_loss_is_same=True,
    ),
    Excuse(
        ("hybrid_mtp_padding_mask",),
        lambda c: c.model == "hybrid" and c.mtp > 0 and c.padding_mask and c.experts != "none",
        loss=5e-4,
        gradient=1e-2,
        first_loss_is_same=True,
    ),
    Excuse(
        ("mtp_roll_packed_sequences",),
        lambda c: c.packing == "padded" and c.mtp > 0,
        loss=2e-3,  # after an update: Adam follows the sign of a changed gradient
        gradient=1e-1,
        first_loss_is_same=True,
    ),
)


@dataclass(frozen=True)
class Known:
    """A regression that has a name and is not mended yet."""

    page: str
    stages: tuple[str, ...]
    when: Callable[[Configuration], bool]


KNOWN: tuple[Known, ...] = ()


@dataclass(frozen=True)
class Finding:
    """Something in which patched differs from stock."""

    kind: str
    """`fails`: stock can do it. `differs`: no page excuses it, or not that much. `known`: see
    `KNOWN`. `excused`: within the bound of the named pages. `only patched`: stock cannot do it.
    `neither`: both fail, at the same stage."""
    stage: str
    detail: str


REGRESSIONS = ("fails", "differs")


def on_stock(setting: Configuration) -> Configuration:
    """What a configuration is compared with, for what stock refuses or gets wrong.

    It refuses the linear loss, and without apex the fused gradients. Its native loss rounds the
    gradients of fp32 and fp16 logits to bf16, and without `total_tokens` its Mamba layers mix
    documents. There, patched code has to do exactly what stock does with another loss, or with
    `total_tokens`.
    """
    rounds = setting.loss == "native" and setting.optimizer in ("float32", "scaled")
    loss = "unfused" if setting.loss == "linear" or rounds else setting.loss
    mixes = setting.model == "hybrid" and setting.packing == "no total"
    packing = "packed" if mixes else setting.packing
    return replace(setting, loss=loss, packing=packing, gradients="apart")


def excuses(setting: Configuration) -> list[Excuse]:
    """Those of a configuration."""
    return [excuse for excuse in EXCUSES if excuse.when(setting)]


def judged(setting: Configuration, records: dict[str, Record]) -> list[Finding]:
    """What the four records of a configuration say: training on both trees, and crossed loads."""
    stock, patched = records["stock"], records["patched"]
    found = list(_side_by_side(setting, stock, patched))
    found += _resumed(stock, patched)
    if "patched loads stock" in records:
        found += _crossed(setting, "patched loads stock", records, stock, stock)
        found += _crossed(setting, "stock loads patched", records, stock, patched)
    return [_known(setting, finding) for finding in found]


def _side_by_side(setting: Configuration, stock: Record, patched: Record) -> Iterator[Finding]:
    for stage, row in stock["rows"].items():
        if stage not in patched["rows"]:
            yield Finding("fails", stage, _said(patched))
            return
        if stage == "resumed" and not _resumes(stock):
            continue  # what patched is held to is its own next step
        yield from _compared(setting, stage, row, patched["rows"][stage])
    for stage in patched["rows"]:
        if stage not in stock["rows"]:
            yield Finding("only patched", stage, _said(stock))
            return
    if stock["error"]:
        yield Finding("neither", f"after {len(stock['rows'])} stages", _said(stock))


def _resumed(stock: Record, patched: Record) -> Iterator[Finding]:
    """A step after a load is the one without it."""
    if "resumed" not in patched["rows"] or _resumes(patched):
        return
    if _resumes(stock) or "resumed" not in stock["rows"]:
        yield Finding("differs", "resumed", "its own checkpoint does not continue the run")


def _resumes(record: Record) -> bool:
    rows = record["rows"]
    return "resumed" in rows and rows["resumed"] == rows["continued"]


def _crossed(
    setting: Configuration, stage: str, records: dict[str, Record], stock: Record, source: Record
) -> Iterator[Finding]:
    """One tree goes on from the other's checkpoint: as the other does, or as its pages excuse."""
    loaded = records[stage]
    if "resumed" in loaded["rows"]:
        if _resumes(source):
            row = source["rows"]["continued"]
            yield from _compared(setting, stage, row, loaded["rows"]["resumed"])
    elif "resumed" in stock["rows"]:
        yield Finding("fails", stage, _said(loaded))


def _compared(setting: Configuration, stage: str, one: Row, other: Row) -> Iterator[Finding]:
    if one == other:
        return
    loss = _relative(sum(one["losses"]), sum(other["losses"]))
    gradient = _relative(one["gradient"], other["gradient"])
    detail = f"loss by {loss:.1e}, gradient norm by {gradient:.1e}"
    given = excuses(setting)
    pages = ", ".join(page for excuse in given for page in excuse.pages)
    within = loss <= sum(e.loss for e in given) and gradient <= sum(e.gradient for e in given)
    if stage == "step 1" and all(excuse.first_loss_is_same for excuse in given):
        within = within and loss == 0.0
    if given and within:
        yield Finding("excused", stage, f"{detail}: {pages}")
    else:
        yield Finding("differs", stage, f"{detail}; excused: {pages or 'no page'}")


def _relative(one: float, other: float) -> float:
    difference = abs(one - other) / max(abs(one), 1e-30)
    return difference if difference == difference else float("inf")  # NaN is within no bound


def _said(record: Record) -> str:
    error = record["error"]
    return f"{error['type']} in {error.get('place', '')}: {error['message']}"


def _known(setting: Configuration, finding: Finding) -> Finding:
    for known in KNOWN:
        if finding.kind in REGRESSIONS and finding.stage in known.stages and known.when(setting):
            return replace(finding, kind="known", detail=f"{known.page}: {finding.detail}")
    return finding
