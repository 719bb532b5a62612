"""The files of a smoke run: its curve, and the summary by which two runs are compared."""

from __future__ import annotations

from pathlib import Path

import msgspec

CURVE, SUMMARY = "curve.json", "summary.json"
STOCK = "stock"
"""`overlay` of a run on the pristine text."""


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """One training step, over all ranks."""

    step: int
    loss: float
    mtp: float | None
    """Mean over the MTP depths, on the labels that Megatron computed; None: there is no MTP."""
    grad_norm: float
    wrong: int
    """MTP labels that are wrong or missing, judged by the documents."""
    labels: int
    """True MTP labels in the documents."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A run in a few numbers."""

    overlay: str
    """Digest of the overlay, or `stock`."""
    seed: int = 1234
    corpus: str = "unknown"
    """Fingerprint of the text."""
    steps: int
    final_loss: float
    final_mtp_loss: float | None
    mtp_labels: int
    wrong_mtp_labels: int
    compile_helpers: str
    true_mtp_loss: tuple[float, ...] = ()
    """Mean loss per MTP depth on the true labels of held-out documents, once it is scored."""

    @property
    def is_stock(self) -> bool:
        """Whether the run trained on the pristine text."""
        return self.overlay == STOCK


def write(path: Path, record: object) -> None:
    """Write a record, or records, as indented JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")


def read_curve(run: Path) -> list[CurvePoint]:
    """Read the curve of a run folder."""
    return msgspec.json.decode((run / CURVE).read_bytes(), type=list[CurvePoint])


def read_summary(run: Path) -> Summary:
    """Read the summary of a run folder."""
    return msgspec.json.decode((run / SUMMARY).read_bytes(), type=Summary)
